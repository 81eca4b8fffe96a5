"""`/v1/responses`: create, retrieve, cancel, delete, and the items that a response was given."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from jaxserve.errors import InvalidRequestError, ResponseNotFoundError
from jaxserve.server.body import read_body
from jaxserve.server.chat_job import make_chat_job
from jaxserve.server.generation import Job, answer
from jaxserve.server.reply import json_reply
from jaxserve.server.request_id import adopt_request_id
from jaxserve.server.responses.chat import chat_request, in_words_of_responses
from jaxserve.server.responses.history import items_before
from jaxserve.server.responses.pages import page_of
from jaxserve.server.responses.reply import ResponseReply
from jaxserve.server.responses.store import StoredResponse
from jaxserve.server.routes import Route
from jaxserve.server.schema.decode import shorten
from jaxserve.server.schema.response_events import ResponseEvent
from jaxserve.server.schema.response_input import new_id, read_input
from jaxserve.server.schema.response_items import Item
from jaxserve.server.schema.response_object import DeletedResponse, ItemList, ReasoningEcho, ResponseObject
from jaxserve.server.schema.responses import ResponsesRequest, TextFormat, TextOptions, check_responses
from jaxserve.server.schema.unsupported import refuse
from jaxserve.server.state import STATE, ServerState


async def create_response(http: web.Request) -> web.StreamResponse:
    state = http.app[STATE]
    request = await read_body(http, ResponsesRequest)
    adopt_request_id(http, request.request_id)
    check_responses(request, state.limits)
    state.require_model(request.model)
    facts = state.client.require_generation()
    given = read_input(request.input)
    before = items_before(state.responses, request.previous_response_id)
    chat = chat_request(request, [*before, *given], state.limits)
    with state.client.admission(1):
        with in_words_of_responses():
            job = await make_chat_job(state, facts, chat)
        response = _response(state, request, job)
        reply = _reply(state, request, response, given)
        try:
            return await answer(http, chat, job, reply)
        except (asyncio.CancelledError, ConnectionResetError):
            reply.cancel()
            raise
        except BaseException:
            state.responses.remove(response.id)
            raise


async def retrieve_response(http: web.Request) -> web.StreamResponse:
    _check_query(http)
    return json_reply(_stored(http).response)


async def cancel_response(http: web.Request) -> web.StreamResponse:
    _stored(http)
    raise InvalidRequestError("Cannot cancel a synchronous response.")


async def delete_response(http: web.Request) -> web.StreamResponse:
    response_id = _stored(http).response.id
    http.app[STATE].responses.remove(response_id)
    return json_reply(DeletedResponse(response_id))


async def list_input_items(http: web.Request) -> web.StreamResponse:
    _check_query(http, "after", "limit", "order")
    return json_reply(page_of(_stored(http).input, **http.query))


def _stored(http: web.Request) -> StoredResponse:
    response_id = http.match_info["response_id"]
    stored = http.app[STATE].responses.get(response_id)
    if stored is None:
        raise ResponseNotFoundError(f"Response with id {shorten(response_id)} not found.")
    return stored


def _check_query(http: web.Request, *names: str) -> None:
    """Refuse what would have to be honoured."""
    for name, value in http.query.items():
        if name not in names and value != "false":
            raise refuse(name.removesuffix("[]"))


def _response(state: ServerState, request: ResponsesRequest, job: Job) -> ResponseObject:
    """In progress, with the settings that hold."""
    text = request.text or TextOptions()
    sampling = job.requests[0].sampling
    return ResponseObject(
        id=new_id("resp"),
        created_at=int(time.time()),
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=state.model_name,
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


def _reply(state: ServerState, request: ResponsesRequest, response: ResponseObject, given: list[Item]) -> ResponseReply:
    def keep(current: ResponseObject) -> None:
        if request.is_stored:
            state.responses.put(StoredResponse(current, given))

    num_top_logprobs = (request.top_logprobs or 0) if request.wants_logprobs else None
    return ResponseReply(response, state.tokenization, num_top_logprobs=num_top_logprobs, keep=keep)


_ONE = "/v1/responses/{response_id}"
ROUTES = (
    Route(
        "POST",
        "/v1/responses",
        create_response,
        summary="Make a response, the reply to a conversation, with reasoning, text and calls as items.",
        tag="OpenAI",
        request=ResponsesRequest,
        reply=ResponseObject,
        event=ResponseEvent,
    ),
    Route("GET", _ONE, retrieve_response, summary="A response that was kept.", tag="OpenAI", reply=ResponseObject),
    Route("DELETE", _ONE, delete_response, summary="Forget a response.", tag="OpenAI", reply=DeletedResponse),
    Route("POST", f"{_ONE}/cancel", cancel_response, summary="Stop a response.", tag="OpenAI", reply=ResponseObject),
    Route("GET", f"{_ONE}/input_items", list_input_items, summary="What it was given.", tag="OpenAI", reply=ItemList),
)
