"""`GET /health`: is this server worth keeping? 503 once the engine is dead or sick."""

from __future__ import annotations

from aiohttp import web

from jaxserve.server.routes import Route
from jaxserve.server.state import STATE


async def health(request: web.Request) -> web.StreamResponse:
    ailment = request.app[STATE].client.ailment()
    if ailment is not None:
        return web.json_response({"status": "unhealthy", "reason": ailment}, status=503)
    return web.json_response({"status": "ok"})


ROUTES = (Route("GET", "/health", health, is_public=True),)
