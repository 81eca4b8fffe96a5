"""`GET /ready`: may requests be sent here? 503 while loading, draining, or without an engine."""

from __future__ import annotations

from aiohttp import web

from jaxserve.errors import UnavailableError
from jaxserve.server.client import EngineClient
from jaxserve.server.routes import Route
from jaxserve.server.state import STATE


async def ready(request: web.Request) -> web.StreamResponse:
    client = request.app[STATE].client
    if client.is_ready:
        return web.json_response({"status": "ready"})
    return web.json_response(_why_not(client), status=503, headers={"Retry-After": str(UnavailableError.retry_after_s)})


def _why_not(client: EngineClient) -> dict[str, str | int]:
    ailment = client.ailment()
    if ailment is not None:
        return {"status": "unhealthy", "reason": ailment}
    if client.is_draining:
        return {"status": "draining"}
    progress = client.progress
    return {"status": "loading", "phase": progress.phase, "done": progress.done, "total": progress.total}


ROUTES = (Route("GET", "/ready", ready, is_public=True),)
