"""`GET /openapi.json` and `GET /docs`: the API described to programs and to people."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec

from jaxserve.apis.routes import Encoded, Route
from jaxserve.http.docs_page import docs_page
from jaxserve.http.handler import HttpCall
from jaxserve.http.openapi import openapi_document

_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@partial(Route, "GET", "/openapi.json", tag="Operation")
async def openapi(call: HttpCall) -> Encoded:
    """Describe this API as an OpenAPI 3.1 document."""
    return Encoded(body=msgspec.json.encode(await _document(call)))


@partial(Route, "GET", "/docs", tag="Operation", media_type="text/html")
async def docs(call: HttpCall) -> Encoded:
    """Describe this API on a page."""
    return Encoded(
        body=docs_page(await _document(call)).encode(),
        media_type="text/html; charset=utf-8",
        headers={"Content-Security-Policy": _PAGE_POLICY},
    )


async def _document(call: HttpCall) -> dict[str, Any]:
    """Return the document, made in a thread: the first time takes long."""
    is_guarded = not call.state.keys.is_open
    return await asyncio.to_thread(openapi_document, call.routes, call.frontend.limits, is_guarded)
