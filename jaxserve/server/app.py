"""The web application: collects the routes of `endpoints/` and puts one boundary around them.

The boundary gives each request its id, asks for the API key, turns every exception into an OpenAI-style
error, and counts. An endpoint contains none of that.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Awaitable, Callable

from aiohttp import web

from jaxserve.errors import RequestError
from jaxserve.server import endpoints
from jaxserve.server.body import add_ignored_header
from jaxserve.server.errors import error_response, hide_internal_error, response_from_http_error
from jaxserve.server.request_id import HEADER, assign_request_id, request_id_of
from jaxserve.server.routes import Route
from jaxserve.server.state import STATE, ServerState

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_PUBLIC = web.AppKey("public_resources", frozenset)


def collect_routes() -> list[Route]:
    """Every route of every file in `endpoints/`."""
    modules = [
        importlib.import_module(f"{endpoints.__name__}.{module.name}")
        for module in pkgutil.iter_modules(endpoints.__path__)
    ]
    return [route for module in modules for route in module.ROUTES]


def make_app(state: ServerState) -> web.Application:
    """The application; whoever runs it closes what `state` holds."""
    app = web.Application(client_max_size=state.max_body_size, middlewares=[_boundary, _guard])
    app[STATE] = state
    public = set()
    for route in collect_routes():
        resource = app.router.add_route(route.method, route.path, route.handler).resource
        if route.is_public:
            public.add(resource)
    app[_PUBLIC] = frozenset(public)
    app.on_response_prepare.append(_add_headers)
    return app


@web.middleware
async def _boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
    assign_request_id(request)
    state = request.app[STATE]
    try:
        response = await handler(request)
    except RequestError as error:
        response = error_response(error)
    except web.HTTPException as error:
        response = response_from_http_error(error, request, state.max_body_size)
    except ConnectionResetError:
        raise
    except Exception as error:
        response = error_response(hide_internal_error(error, request_id_of(request)))
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "none"
    state.metrics.inc("http_requests", route=route, status=str(response.status))
    return response


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.match_info.route.resource not in request.app[_PUBLIC]:
        request.app[STATE].keys.check(request.headers.get("Authorization"))
    return await handler(request)


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "jaxserve"
    response.headers[HEADER] = request_id_of(request)
    add_ignored_header(request, response)
