"""`GET /ready`: may requests be sent here? 503 while loading, draining, or without an engine."""

from __future__ import annotations

from aiohttp import web

from jaxserve.errors import UnavailableError
from jaxserve.server.reply import json_reply
from jaxserve.server.routes import Route
from jaxserve.server.schema.operation import Draining, Loading, Ready, Unhealthy
from jaxserve.server.state import STATE, ServerState


async def ready(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    if state.client.is_ready and state.tokenization.is_installed:
        return json_reply(Ready())
    return json_reply(_why_not(state), status=503, headers={"Retry-After": str(UnavailableError.retry_after_s)})


def _why_not(state: ServerState) -> Unhealthy | Draining | Loading:
    ailment = state.client.ailment()
    if ailment is not None:
        return Unhealthy(ailment)
    return Draining() if state.client.is_draining else state.startup.under_way()


ROUTES = (
    Route(
        "GET",
        "/ready",
        ready,
        is_public=True,
        summary="Whether requests may be sent here: 503 while loading, draining, or without an engine.",
        tag="Operation",
        reply=Ready,
        other_replies=((503, Unhealthy | Draining | Loading),),
    ),
)
