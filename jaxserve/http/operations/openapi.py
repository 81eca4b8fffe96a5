"""`GET /openapi.json` and `GET /docs`: the API described to programs and to people."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from jaxserve.apis.routes import API_ROUTES, Route
from jaxserve.http.docs_page import docs_page
from jaxserve.http.openapi import openapi_document
from jaxserve.http.state import STATE

_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@partial(Route, "GET", "/openapi.json", tag="Operation")
async def openapi(request: web.Request) -> web.StreamResponse:
    """This API as an OpenAPI 3.1 document."""
    return web.Response(body=msgspec.json.encode(await _document(request)), content_type="application/json")


@partial(Route, "GET", "/docs", tag="Operation", media_type="text/html")
async def docs(request: web.Request) -> web.StreamResponse:
    """This API as a page."""
    return web.Response(
        text=docs_page(await _document(request)),
        content_type="text/html",
        headers={"Content-Security-Policy": _PAGE_POLICY},
    )


async def _document(request: web.Request) -> dict[str, Any]:
    """Sources are read for their texts: others want to be heard meanwhile."""
    state = request.app[STATE]
    return await asyncio.to_thread(openapi_document, request.app[API_ROUTES], state.limits, not state.keys.is_open)
