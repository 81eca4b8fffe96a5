"""`/v1/responses`: create, retrieve, cancel, delete, and the items that a response was given."""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial

from aiohttp import web

from jaxserve.apis.openai.chat_schema import ChatRequest
from jaxserve.apis.responses.events import ResponseEvent
from jaxserve.apis.responses.history import items_before
from jaxserve.apis.responses.input import read_input
from jaxserve.apis.responses.items import Item
from jaxserve.apis.responses.pages import PageQuery, page_of
from jaxserve.apis.responses.reply import ResponseReply
from jaxserve.apis.responses.response import DeletedResponse, ItemList, ReasoningEcho, ResponseObject
from jaxserve.apis.responses.schema import ResponsesRequest, TextFormat, TextOptions, check_moved, check_responses
from jaxserve.apis.responses.store import StoredResponse
from jaxserve.apis.responses.to_request import NAMES, chat_request
from jaxserve.apis.routes import Route
from jaxserve.apis.schema.decode import shorten
from jaxserve.apis.schema.renaming import renamed
from jaxserve.errors import InvalidRequestError, RequestError, ResponseNotFoundError
from jaxserve.frontend.handle import Job, answer, generating, take_deltas
from jaxserve.frontend.prepare import make_chat_job
from jaxserve.http.body import ignored_fields, read_body
from jaxserve.http.errors import hide_internal_error
from jaxserve.http.query import NoQuery, read_query
from jaxserve.http.reply import json_reply
from jaxserve.http.state import STATE, ServerState

_ONE = "/v1/responses/{response_id}"


@partial(
    Route, "POST", "/v1/responses", tag="OpenAI", request=ResponsesRequest, reply=ResponseObject, event=ResponseEvent
)
async def create_response(http: web.Request) -> web.StreamResponse:
    """Make a response, the reply to a conversation, with reasoning, text and calls as items."""
    state = http.app[STATE]
    request = await read_body(http, ResponsesRequest)
    check_moved(ignored_fields(http))
    check_responses(request, state.limits)
    state.require_model(request.model)
    model_info = state.client.require_generation()
    given = read_input(request.input)
    before = await items_before(state.responses, request.previous_response_id)
    chat = chat_request(request, [*before, *given], state.limits)
    with contextlib.ExitStack() as room:
        room.enter_context(state.client.admission(1))
        with renamed(NAMES):
            job = await make_chat_job(state, model_info, chat)
        reply = _reply(state, request, chat, job, given)
        if request.background:
            return json_reply(_start(state, job, reply, room.pop_all()))
        return await _answer(http, chat, job, reply)


@partial(Route, "GET", _ONE, tag="OpenAI", reply=ResponseObject)
async def retrieve_response(http: web.Request) -> web.StreamResponse:
    """A response that was kept."""
    read_query(http, NoQuery)
    return json_reply((await _stored(http)).response)


@partial(Route, "POST", f"{_ONE}/cancel", tag="OpenAI", reply=ResponseObject)
async def cancel_response(http: web.Request) -> web.StreamResponse:
    """Stop a response."""
    response = (await _stored(http)).response
    if not response.background:
        raise InvalidRequestError("Cannot cancel a synchronous response.")
    if response.status == "in_progress":
        response = _found(http, await http.app[STATE].responses.cancel(response.id)).response
    if response.status != "cancelled":
        raise InvalidRequestError(f"Cannot cancel a response that is {response.status}.")
    return json_reply(response)


@partial(Route, "DELETE", _ONE, tag="OpenAI", reply=DeletedResponse)
async def delete_response(http: web.Request) -> web.StreamResponse:
    """Forget a response."""
    stored = _found(http, await http.app[STATE].responses.delete(http.match_info["response_id"]))
    return json_reply(DeletedResponse(stored.response.id))


@partial(Route, "GET", f"{_ONE}/input_items", tag="OpenAI", query=PageQuery, reply=ItemList)
async def list_input_items(http: web.Request) -> web.StreamResponse:
    """What it was given."""
    query = read_query(http, PageQuery)
    return json_reply(page_of((await _stored(http)).input, query))


async def _answer(http: web.Request, chat: ChatRequest, job: Job, reply: ResponseReply) -> web.StreamResponse:
    """With what is kept of a reply that does not come to its end."""
    try:
        return await answer(http, chat, job, reply)
    except (asyncio.CancelledError, ConnectionResetError):
        reply.cancel()
        raise
    except BaseException:  # the client gets an error and no id
        http.app[STATE].responses.store.remove(reply.id)
        raise


def _start(state: ServerState, job: Job, reply: ResponseReply, room: contextlib.ExitStack) -> ResponseObject:
    """Begin a response that nobody waits for, in the queue room that it gives back at its end."""

    async def work() -> None:
        try:
            with generating(state, job) as generation:
                await take_deltas(job, generation, lambda piece: reply.chunks(piece, None))
            reply.closing(job.usage())
        except Exception as error:
            reply.fail(error if isinstance(error, RequestError) else hide_internal_error(error, reply.id))

    def end(is_cancelled: bool) -> None:
        room.close()
        if is_cancelled:
            reply.cancel()

    response = reply.begin()
    state.responses.run(reply.id, work(), end)
    return response


async def _stored(http: web.Request) -> StoredResponse:
    return _found(http, await http.app[STATE].responses.get(http.match_info["response_id"]))


def _found(http: web.Request, stored: StoredResponse | None) -> StoredResponse:
    if stored is None:
        raise ResponseNotFoundError(f"Response with id {shorten(http.match_info['response_id'])} not found.")
    return stored


def _response(state: ServerState, request: ResponsesRequest, job: Job) -> ResponseObject:
    """In progress, with the settings that hold."""
    text = request.text or TextOptions()
    sampling = job.requests[0].sampling
    return ResponseObject(
        id=state.responses.new_id(),
        created_at=int(time.time()),
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=state.shown_name(request.model),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=ReasoningEcho(request.reasoning.effort if request.reasoning is not None else None),
        safety_identifier=request.safety_identifier,
        store=request.is_stored,
        temperature=sampling.temperature,
        text=TextOptions(format=text.format or TextFormat(type="text"), verbosity=text.verbosity),
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=sampling.top_p,
        user=request.user,
        metadata=request.metadata or {},
    )


def _reply(
    state: ServerState, request: ResponsesRequest, chat: ChatRequest, job: Job, given: list[Item]
) -> ResponseReply:
    store = state.responses.store

    def keep(current: ResponseObject, is_first: bool) -> None:
        if request.is_stored and (is_first or current.id in store):  # else it was deleted meanwhile
            store.put(StoredResponse(current, given))

    return ResponseReply(
        _response(state, request, job),
        state.tokenization,
        num_top_logprobs=chat.num_top_logprobs,
        timing=job.timing if request.return_metrics else None,
        keep=keep,
    )
