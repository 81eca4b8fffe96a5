"""Inputs of an HTTP request: its id, its body and its query, decoded and checked."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar

import msgspec
from aiohttp import web

from jaxserve.apis.schema.common import MAX_REQUEST_ID_CHARS
from jaxserve.apis.schema.decode import MAX_BYTES_ON_LOOP, decode_request
from jaxserve.apis.schema.unsupported import IGNORED_HEADER, TOOL_FORMAT_HEADER
from jaxserve.errors import InvalidRequestError, UnsupportedMediaTypeError
from jaxserve.frontend.checks import MAX_ECHOED_CHARS, check_bounds, invalid_field, refuse, shorten
from jaxserve.frontend.encode import RequestNotes
from jaxserve.frontend.tokenization import Tokenization
from jaxserve.http.errors import too_large, too_slow
from jaxserve.http.state import STATE
from jaxserve.tenants import HTTP_REQUEST_ID

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")

HEADER = "X-Request-Id"

_USABLE = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_CHARS}}}")
_REQUEST_ID = web.RequestKey("request_id", str)


def adopt_request_id(request: web.Request, offered: str | None) -> None:
    """Take the body's `request_id` if no header gave one."""
    if offered is not None and HEADER not in request.headers and _USABLE.fullmatch(offered):
        request[_REQUEST_ID] = offered
        HTTP_REQUEST_ID.set(offered)


def request_id_of(request: web.Request) -> str:
    """Return the request's id; the first call chooses it."""
    if _REQUEST_ID not in request:
        offered = request.headers.get(HEADER, "")
        request[_REQUEST_ID] = offered if _USABLE.fullmatch(offered) else uuid.uuid4().hex
    return request[_REQUEST_ID]


_MAX_HEADER_CHARS = 1024
LARGE_BODY: Final = web.RequestKey("large_body", bool)
"""True: what repeats the body, as replies may, takes too long for the event loop."""
_IGNORED = web.RequestKey("ignored_fields", list)
_TOOL_FORMAT = web.RequestKey("tool_format", str)


@dataclass(frozen=True, slots=True)
class Body(Generic[T]):
    """A request's body, decoded and checked."""

    request: T
    unknown: list[str]
    """Names of the fields that `request` does not have."""
    is_large: bool
    """True: whatever looks at all of it takes too long for the event loop."""


async def off_loop(threads: Tokenization, is_large: bool, work: Callable[..., R], *arguments: Any) -> R:
    """Return what `work` returns, which looks at a whole body: in a thread of the tokenizer's if that is large."""
    return await threads.call(partial(work, *arguments)) if is_large else work(*arguments)


async def read_body(http: web.Request, struct: type[T]) -> Body[T]:
    """Return the decoded body, whose `request_id` becomes the request's. Raises RequestError."""
    if http.content_type != "application/json":
        raise UnsupportedMediaTypeError(
            f"Invalid Content-Type {shorten(http.headers.get('Content-Type', ''))}: send application/json."
        )
    if http.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMediaTypeError("Content-Encoding is not supported: send the JSON as it is.")
    state = http.app[STATE]
    max_body_size, timeout_s = state.max_body_size, state.connection.body_timeout
    if http.content_length is not None and http.content_length > max_body_size:
        raise too_large(max_body_size)
    try:
        async with asyncio.timeout(timeout_s):
            body = await http.read()
    except TimeoutError:
        raise too_slow(timeout_s) from None
    limits, is_large = state.models.first.limits, len(body) > MAX_BYTES_ON_LOOP

    def decode() -> tuple[T, list[str]]:
        request, unknown = decode_request(struct, body, limits.max_body_values)
        check_bounds(request, limits)
        return request, unknown

    request, unknown = await off_loop(state.models.first.tokenization, is_large, decode)
    if unknown and state.is_strict:
        name = unknown[0][:MAX_ECHOED_CHARS]
        raise InvalidRequestError(
            f"Unknown parameter: '{name}' (--strict-parameters).", param=name, code="unknown_parameter"
        )
    http[_IGNORED] = unknown
    http[LARGE_BODY] = is_large
    adopt_request_id(http, getattr(request, "request_id", None))
    return Body(request, unknown, is_large)


def take_notes(http: web.Request, notes: RequestNotes) -> None:
    """Keep what the headers of the reply are to say of the request."""
    http[_IGNORED] = [*http.get(_IGNORED, []), *notes.ignored]
    if notes.tool_format is not None:
        http[_TOOL_FORMAT] = notes.tool_format


def add_note_headers(http: web.Request, response: web.StreamResponse) -> None:
    """Name the fields of the body that had no effect, and a format of tool calls that is not the model's own."""
    if _TOOL_FORMAT in http:
        response.headers[TOOL_FORMAT_HEADER] = http[_TOOL_FORMAT]
    names = [name for name in http.get(_IGNORED, [])[:_MAX_HEADER_CHARS] if name.isascii() and name.isprintable()]
    if names:
        response.headers[IGNORED_HEADER] = ",".join(names)[:_MAX_HEADER_CHARS]


def read_query(http: web.Request, struct: type[T]) -> T:
    """Return the parameters. Raises RequestError, also for unknown ones unless they are `false`."""
    names = struct.__struct_fields__
    for name, value in http.query.items():
        if name not in names and value != "false":
            raise refuse(shorten(name.removesuffix("[]"))[1:-1])
    given = {name: http.query[name] for name in names if name in http.query}
    try:
        query = msgspec.convert(given, struct, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_field(str(error), struct=struct) from None
    check_bounds(query, http.app[STATE].models.first.limits)
    return query
