"""`GET /health`: is this server worth keeping? 503 once the engine is dead or sick."""

from __future__ import annotations

from aiohttp import web

from jaxserve.server.reply import json_reply
from jaxserve.server.routes import Route
from jaxserve.server.schema.operation import Healthy, Unhealthy
from jaxserve.server.state import STATE


async def health(request: web.Request) -> web.StreamResponse:
    ailment = request.app[STATE].client.ailment()
    return json_reply(Healthy()) if ailment is None else json_reply(Unhealthy(ailment), status=503)


ROUTES = (
    Route(
        "GET",
        "/health",
        health,
        is_public=True,
        summary="Whether this server is worth keeping: 503 once the engine is dead or sick.",
        tag="Operation",
        reply=Healthy,
        other_replies=((503, Unhealthy),),
    ),
)
