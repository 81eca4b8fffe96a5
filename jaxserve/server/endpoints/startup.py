"""`GET /startup`: what the start took, phase by phase and program by program."""

from __future__ import annotations

from aiohttp import web

from jaxserve.server.routes import Route
from jaxserve.server.startup import startup_json
from jaxserve.server.state import STATE


async def startup(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    facts = state.client.facts
    if facts is None:
        return web.json_response({"status": "loading", **state.startup.under_way()})
    return web.json_response({"status": "started", **startup_json(state.startup.spans(facts.startup), facts.startup)})


ROUTES = (Route("GET", "/startup", startup),)
