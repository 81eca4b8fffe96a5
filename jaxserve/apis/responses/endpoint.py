"""`/v1/responses`: create, retrieve, cancel, delete, the items that a response was given, and the tokens of an input."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial

import msgspec

from jaxserve.apis.responses.events import ResponseEvent
from jaxserve.apis.responses.history import items_before
from jaxserve.apis.responses.input import read_input
from jaxserve.apis.responses.items import Item
from jaxserve.apis.responses.pages import PageQuery, page_of
from jaxserve.apis.responses.reply import ResponseFormatter
from jaxserve.apis.responses.response import DeletedResponse, InputTokens, ItemList, ReasoningEcho, ResponseObject
from jaxserve.apis.responses.schema import ResponsesRequest, TextFormat, TextOptions, check_moved, check_responses
from jaxserve.apis.responses.store import KeptResponse, StoredResponse
from jaxserve.apis.responses.to_request import to_request
from jaxserve.apis.routes import Call, Encoded, Generated, Route
from jaxserve.errors import InvalidRequestError, RequestError, ResponseNotFoundError
from jaxserve.frontend.checks import shorten
from jaxserve.frontend.encode import encode_conversation
from jaxserve.frontend.errors import hide_internal_error
from jaxserve.frontend.handle import RequestHandle
from jaxserve.frontend.prepare import prepare
from jaxserve.frontend.request import Conversation, GenerationRequest
from jaxserve.ipc.messages import RequestOutput

_ONE = "/v1/responses/{response_id}"


class NoQuery(msgspec.Struct):
    """The query of a route that takes no parameters."""


@partial(Route, "POST", "/v1/responses", tag="OpenAI", reply=ResponseObject, event=ResponseEvent)
async def create_response(call: Call, body: ResponsesRequest) -> Generated | ResponseObject:
    """Create a response, the reply to a conversation, with reasoning, text and calls as items."""
    frontend = call.frontend
    given = await call.off_loop(_read, call, body)
    frontend.require_generation(body.model)
    request = await _translated(call, body, given)
    call.cleanup.enter_context(frontend.admitted(request))
    handle = await prepare(frontend, request)
    formatter = _formatter(call, body, handle, given)
    if body.background:
        return _start(call, handle, formatter)
    call.cleanup.push(formatter)
    return Generated(
        handle=call.cleanup.enter_context(handle),
        formatter=formatter,
        is_streamed=bool(body.stream),
        fail=formatter.fail,
        keep=formatter.publish,
    )


@partial(Route, "POST", "/v1/responses/input_tokens", tag="OpenAI", reply=InputTokens)
async def count_input_tokens(call: Call, body: ResponsesRequest) -> InputTokens:
    """Count the tokens of the prompt that a request for a response would have."""
    frontend = call.frontend
    given = await call.off_loop(_read, call, body)
    frontend.require_generation(body.model)
    request = await _translated(call, body, given)
    assert isinstance(request.prompt, Conversation)
    model_info = frontend.client.require_ready()
    images = await frontend.images.load(request.prompt.images, model_info.images)
    return InputTokens(len(await encode_conversation(frontend.tokenization, request.prompt, images=images)))


@partial(Route, "GET", _ONE, tag="OpenAI", reply=ResponseObject)
async def retrieve_response(call: Call, response_id: str, query: NoQuery) -> Encoded:
    """Return a stored response."""
    return Encoded(body=_found(response_id, await call.responses.get(response_id)).response)


@partial(Route, "POST", f"{_ONE}/cancel", tag="OpenAI", reply=ResponseObject)
async def cancel_response(call: Call, response_id: str) -> Encoded:
    """Cancel a background response."""
    response = _found(response_id, await call.responses.get(response_id))
    if not response.background:
        raise InvalidRequestError("Cannot cancel a synchronous response.")
    if response.status == "in_progress":
        response = _found(response_id, await call.responses.cancel(response_id))
    if response.status != "cancelled":
        raise InvalidRequestError(f"Cannot cancel a response that is {response.status}.")
    return Encoded(body=response.response)


@partial(Route, "DELETE", _ONE, tag="OpenAI", reply=DeletedResponse)
async def delete_response(call: Call, response_id: str) -> DeletedResponse:
    """Delete a stored response."""
    return DeletedResponse(_found(response_id, await call.responses.delete(response_id)).id)


@partial(Route, "GET", f"{_ONE}/input_items", tag="OpenAI", reply=ItemList)
async def list_input_items(call: Call, response_id: str, query: PageQuery) -> ItemList:
    """List the items that a response was given."""
    return page_of(_found(response_id, await call.responses.get(response_id)).input_items(), query)


def _read(call: Call, body: ResponsesRequest) -> list[Item]:
    """Return the items of a request, checked. Raises InvalidRequestError."""
    check_moved(call.ignored_fields)
    check_responses(body)
    return read_input(body.input)


async def _translated(call: Call, body: ResponsesRequest, given: list[Item]) -> GenerationRequest:
    """Return the request with the conversation that it continues, which may be long where its body is short."""
    before = await items_before(call.responses, body.previous_response_id, call.reserve)
    translate = partial(to_request, body, [*before, *given], call.frontend.limits, len(before))
    return await (call.frontend.tokenization.call(translate) if before else call.off_loop(translate))


def _start(call: Call, handle: RequestHandle, formatter: ResponseFormatter) -> ResponseObject:
    """Begin a response in the background; it keeps its place in the queue until its end."""
    call.note(handle.notes)
    cleanup: ExitStack = call.cleanup.pop_all()

    def take(outputs: list[RequestOutput]) -> bool:
        for delta in handle.deltas(outputs):
            formatter.chunks(delta, None)
        return True

    async def work() -> None:
        try:
            with handle:
                while not handle.is_finished:
                    await handle.consume(take)
            formatter.closing(handle.counts())
        except Exception as error:
            formatter.fail(error if isinstance(error, RequestError) else hide_internal_error(error, formatter.id))

    def end(is_cancelled: bool) -> None:
        cleanup.close()
        if is_cancelled:
            formatter.cancel()

    response = formatter.begin()
    call.responses.run(formatter.id, work(), end)
    return response


def _found(response_id: str, stored: KeptResponse | None) -> KeptResponse:
    if stored is None:
        raise ResponseNotFoundError(f"Response with id {shorten(response_id)} not found.")
    return stored


def _response(call: Call, body: ResponsesRequest, handle: RequestHandle) -> ResponseObject:
    """Return the response in progress, with the settings that hold."""
    text = body.text or TextOptions()
    sampling = handle.requests[0].sampling
    return ResponseObject(
        id=call.responses.new_id(),
        created_at=int(time.time()),
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=call.frontend.shown_name(body.model),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningEcho(body.reasoning.effort if body.reasoning is not None else None),
        safety_identifier=body.safety_identifier,
        store=body.is_stored,
        temperature=sampling.temperature,
        text=TextOptions(format=text.format or TextFormat(type="text"), verbosity=text.verbosity),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=sampling.top_p,
        user=body.user,
        metadata=body.metadata or {},
    )


def _formatter(call: Call, body: ResponsesRequest, handle: RequestHandle, given: list[Item]) -> ResponseFormatter:
    store = call.responses.store

    def keep(current: ResponseObject, is_first: bool) -> None:
        if body.is_stored and (is_first or store.is_open(current.id)):  # else it was deleted meanwhile
            store.put(StoredResponse(current, given))

    return ResponseFormatter(
        _response(call, body, handle),
        call.frontend.tokenization,
        num_top_logprobs=handle.requests[0].sampling.num_top_logprobs,
        timing=handle.timing if body.return_metrics else None,
        keep=keep,
        forget=store.remove,
    )
