"""`GET /metrics`: Prometheus text, summed over all API processes."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from jaxserve.server.routes import Route
from jaxserve.server.state import STATE


async def metrics(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    body = await state.siblings.exposition(state.metrics)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


ROUTES = (
    Route(
        "GET",
        "/metrics",
        metrics,
        summary="Numbers for Prometheus, summed over all API processes.",
        tag="Operation",
        media_type="text/plain",
    ),
)
