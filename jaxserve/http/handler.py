"""From an HTTP request to the call of an endpoint, and from its reply to the response."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from jaxserve.apis.routes import Call, Route
from jaxserve.http.body import read_body
from jaxserve.http.listener import Handler
from jaxserve.http.query import read_query
from jaxserve.http.reply import send
from jaxserve.http.request_id import request_id_of
from jaxserve.http.state import STATE, ServerState


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall(Call):
    """A call with the state of the HTTP side, for endpoints of the server's operation."""

    state: ServerState
    routes: tuple[Route, ...]


ROUTES: web.AppKey[tuple[Route, ...]] = web.AppKey("routes", tuple)
"""Every route of the application."""


def handler_of(route: Route) -> Handler:
    """Return the handler that decodes the inputs of the route's function, calls it and sends its reply."""
    inputs = route.parameters

    async def handle(http: web.Request) -> web.StreamResponse:
        state = http.app[STATE]
        arguments: dict[str, Any] = {name: http.match_info[name] for name in inputs if name not in ("body", "query")}
        ignored: list[str] = []
        if "body" in inputs:
            arguments["body"], ignored = await read_body(http, inputs["body"])
        if "query" in inputs:
            arguments["query"] = read_query(http, inputs["query"])
        with ExitStack() as cleanup:
            call = HttpCall(
                frontend=state.frontend,
                responses=state.responses,
                request_id=request_id_of(http),
                ignored_fields=ignored,
                cleanup=cleanup,
                state=state,
                routes=http.app[ROUTES],
            )
            return await send(http, route, await route.handler(call, **arguments))

    return handle
