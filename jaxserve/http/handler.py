"""From an HTTP request to the call of an endpoint, and from its reply to the response, whole or as events."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import web

from jaxserve.apis.routes import Call, Computed, Encoded, Generated, Reply, Route
from jaxserve.apis.schema.common import version_header
from jaxserve.apis.schema.encode import encode_in_parts, encode_reply
from jaxserve.errors import RequestError
from jaxserve.frontend.choices.choice_stream import OutputDelta
from jaxserve.frontend.errors import hide_internal_error
from jaxserve.http.inputs import LARGE_BODY, off_loop, read_body, read_query, request_id_of, take_notes
from jaxserve.http.large_body import json_response
from jaxserve.http.listener import Handler
from jaxserve.http.sse import KEEP_ALIVE, EventStream, frame, frames_that_repeat
from jaxserve.http.state import STATE, ServerState
from jaxserve.ipc.messages import RequestOutput
from jaxserve.tenants import TENANT


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall(Call):
    """A call with the state of the HTTP side, for endpoints of the server's operation."""

    state: ServerState
    routes: tuple[Route, ...]


ADMISSION: Final = web.RequestKey("admission", ExitStack)
"""Counts the request among those of its key until it is closed; a background response takes it along."""
_FAILED_STATUS = web.RequestKey("failed_status", int)
JSON: Final = "application/json"


def failed_status_of(http: web.Request) -> int | None:
    """Return the status of the error that ended a stream after its status line was sent; None if there was none."""
    return http.get(_FAILED_STATUS)


ROUTES: web.AppKey[tuple[Route, ...]] = web.AppKey("routes", tuple)
"""Every route of the application."""


def handler_of(route: Route) -> Handler:
    """Return the handler that decodes the inputs of the route's function, calls it and sends its reply."""
    inputs, is_command = route.parameters, route.is_command

    async def handle(http: web.Request) -> web.StreamResponse:
        state = http.app[STATE]
        arguments: dict[str, Any] = {name: http.match_info[name] for name in inputs if name not in ("body", "query")}
        ignored: list[str] = []
        is_large = False
        key_name = "" if (tenant := TENANT.get()) is None else state.keys.shared_name(tenant)
        with ExitStack() as cleanup, ExitStack() as reading:
            reserve = reading.enter_context(state.bodies.reservation(key_name))
            if (admission := http.get(ADMISSION)) is not None:
                cleanup.enter_context(admission.pop_all())
            if "body" in inputs:
                size = http.content_length if http.content_length is not None else state.max_body_size
                reserve(min(size, state.max_body_size))
                body = await read_body(http, inputs["body"])
                arguments["body"], ignored, is_large = body.request, body.unknown, body.is_large
            if "query" in inputs:
                arguments["query"] = read_query(http, inputs["query"])
            # The `model` in the body of a command is a source of weights.
            name = _model_named(arguments.get("query"), None if is_command else arguments.get("body"))
            call = HttpCall(
                frontend=state.models.commanded(name) if is_command else state.models.named(name),
                models=state.models,
                responses=state.responses,
                request_id=request_id_of(http),
                ignored_fields=ignored,
                off_loop=partial(off_loop, state.models.first.tokenization, is_large),
                note=partial(take_notes, http),
                reserve=reserve,
                cleanup=cleanup,
                state=state,
                routes=http.app[ROUTES],
            )
            reply = await route.handler(call, **arguments)
            reading.close()
            if isinstance(reply, Generated):
                call.note(reply.handle.notes)
            try:
                return await send(http, route, reply)
            except (asyncio.CancelledError, ConnectionResetError):
                if isinstance(reply, Generated):
                    call.frontend.metrics.inc("client_disconnects")
                raise

    return handle


def _model_named(*inputs: object) -> str | None:
    """Return the model that the query or the body of a request names."""
    return next((name for one in inputs if (name := getattr(one, "model", None)) is not None), None)


async def send(http: web.Request, route: Route, reply: Reply) -> web.StreamResponse:
    """Send the reply. A client that leaves ends its request within one engine step."""
    if isinstance(reply, msgspec.Struct):
        return await json_response(http, await encode_reply(reply))
    if isinstance(reply, Encoded):
        if reply.media_type == JSON and reply.status == 200:
            return await json_response(http, reply.body, reply.headers)
        headers = {"Content-Type": reply.media_type, **reply.headers}
        return web.Response(body=reply.body, status=reply.status, headers=headers)
    if isinstance(reply, Computed):
        return await _send_computed(http, route, reply)
    return await (_stream(http, route, reply) if reply.is_streamed else _collect(http, reply))


async def _send_computed(http: web.Request, route: Route, reply: Computed) -> web.StreamResponse:
    formatter = reply.formatter
    if not reply.is_streamed:
        whole = formatter.reply([[delta] for delta in reply.deltas], reply.counts)
        return await json_response(http, await encode_reply(whole))
    events = EventStream(http)
    chunks = [chunk for delta in reply.deltas for chunk in formatter.chunks(delta, None)]
    await events.close([*map(frame, [*formatter.opening(), *chunks, *formatter.closing(reply.counts)]), end_of(route)])
    return events.response


async def _collect(http: web.Request, reply: Generated) -> web.StreamResponse:
    handle = reply.handle
    choices = await handle.collect()

    def encode() -> tuple[msgspec.Struct, bytes]:
        whole = reply.formatter.reply(choices, handle.counts())
        return whole, encode_in_parts(whole)

    # Many log-probabilities take seconds to encode, in which the event loop must serve other requests.
    is_large = handle.is_large or http.get(LARGE_BODY, False)
    whole, body = await asyncio.to_thread(encode) if is_large else encode()
    if reply.keep is not None:
        reply.keep(whole)
    return await json_response(http, body, version_header(handle.weight_version))


async def _stream(http: web.Request, route: Route, reply: Generated) -> web.StreamResponse:
    events, handle, formatter = EventStream(http), reply.handle, reply.formatter
    ping = KEEP_ALIVE if route.style.ping is None else frame(route.style.ping)
    is_large = http.get(LARGE_BODY, False)
    frames = await frames_that_repeat(formatter.opening(), is_large=is_large)

    held: list[OutputDelta] = []
    unshown = set(range(len(handle.choices))) if is_large else set()
    """Choices whose first delta was not formatted yet: it may repeat the prompt of a large body."""

    def takes_long(delta: OutputDelta) -> bool:
        return len(delta.prompt) > 1 or delta.index in unshown

    def framed(deltas: list[OutputDelta]) -> list[bytes]:
        counts = handle.counts() if reply.has_continuous_usage else None
        return [frame(chunk) for delta in deltas for chunk in formatter.chunks(delta, counts)]

    def show(outputs: list[RequestOutput]) -> bool:
        deltas = handle.deltas(outputs)
        if any(map(takes_long, deltas)):
            held.extend(deltas)
            unshown.difference_update(delta.index for delta in deltas)
            return False
        frames.extend(framed(deltas))
        if events.has_space and frames and not handle.is_finished:
            events.push(frames)
            frames.clear()
        return events.has_space

    try:
        while not handle.is_finished:
            if not await handle.consume(show, http.app[STATE].keep_alive_s):
                frames.append(ping)
            if held:  # prompts, or their scores, which take long to format
                frames += await asyncio.to_thread(framed, held)
                held.clear()
            events.add_headers(version_header(handle.weight_version))
            if not handle.is_finished:  # else the last text leaves with the end
                await events.send(frames)
                frames.clear()
        last_frames = await frames_that_repeat(formatter.closing(handle.counts()), is_large=is_large)
        await events.close([*frames, *last_frames, end_of(route)])
    except (asyncio.CancelledError, ConnectionResetError):
        raise
    except Exception as error:
        if not events.has_started:
            raise
        shown = error if isinstance(error, RequestError) else hide_internal_error(error, request_id_of(http))
        http[_FAILED_STATUS] = shown.status
        last = route.style.error_body(shown, request_id_of(http)) if reply.fail is None else reply.fail(shown)
        await events.close([frame(last), end_of(route)])
    return events.response


def end_of(route: Route) -> bytes:
    """Return the bytes after a stream's last event."""
    return b"" if route.last_event is None else b"data: %b\n\n" % route.last_event.encode()
