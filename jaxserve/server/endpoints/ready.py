"""`GET /ready`: may requests be sent here? 503 while loading, draining, or without an engine."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from jaxserve.errors import UnavailableError
from jaxserve.server.routes import Route
from jaxserve.server.state import STATE, ServerState


async def ready(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    if state.client.is_ready and state.tokenization.is_installed:
        return web.json_response({"status": "ready"})
    return web.json_response(_why_not(state), status=503, headers={"Retry-After": str(UnavailableError.retry_after_s)})


def _why_not(state: ServerState) -> dict[str, Any]:
    ailment = state.client.ailment()
    if ailment is not None:
        return {"status": "unhealthy", "reason": ailment}
    if state.client.is_draining:
        return {"status": "draining"}
    return {"status": "loading", **state.startup.under_way()}


ROUTES = (Route("GET", "/ready", ready, is_public=True),)
