"""`GET /startup`: what the start took, phase by phase and program by program."""

from __future__ import annotations

from aiohttp import web

from jaxserve.server.reply import json_reply
from jaxserve.server.routes import Route
from jaxserve.server.schema.operation import Loading, Started
from jaxserve.server.startup import startup_reply
from jaxserve.server.state import STATE


async def startup(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    facts = state.client.facts
    if facts is None:
        return json_reply(state.startup.under_way())
    return json_reply(startup_reply(state.startup.spans(facts.startup), facts.startup))


ROUTES = (
    Route(
        "GET",
        "/startup",
        startup,
        summary="What the start took, or how far it is.",
        tag="Operation",
        reply=Started | Loading,
    ),
)
