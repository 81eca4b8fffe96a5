"""The id of an HTTP request: the client's `X-Request-Id` when it is usable, else a new one. Echoed in every reply."""

from __future__ import annotations

import re
import uuid

from aiohttp import web

from jaxserve.apis.schema.common import MAX_REQUEST_ID_CHARS

HEADER = "X-Request-Id"

_USABLE = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_CHARS}}}")
_REQUEST_ID = web.RequestKey("request_id", str)


def adopt_request_id(request: web.Request, offered: str | None) -> None:
    """Take the body's `request_id` if no header gave one."""
    if offered is not None and HEADER not in request.headers and _USABLE.fullmatch(offered):
        request[_REQUEST_ID] = offered


def request_id_of(request: web.Request) -> str:
    """Return the request's id; the first call chooses it."""
    if _REQUEST_ID not in request:
        offered = request.headers.get(HEADER, "")
        request[_REQUEST_ID] = offered if _USABLE.fullmatch(offered) else uuid.uuid4().hex
    return request[_REQUEST_ID]
