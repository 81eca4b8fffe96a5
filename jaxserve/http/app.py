"""The web application: collects the routes and puts one boundary around them.

The boundary gives each request its id, asks for the API key, turns every exception into an
error in the style of its route, and counts. An endpoint contains none of that.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType

import msgspec
from aiohttp import web

import jaxserve.apis
import jaxserve.http.operations
from jaxserve.apis.routes import ApiStyle, Route
from jaxserve.errors import OperatorError, OriginError, RequestError
from jaxserve.frontend.errors import hide_internal_error
from jaxserve.frontend.handle import USAGE, Usage
from jaxserve.http.access import is_local_page
from jaxserve.http.connection import connection_of
from jaxserve.http.errors import error_response, response_from_http_error
from jaxserve.http.handler import ADMISSION, ROUTES, failed_status_of, handler_of
from jaxserve.http.inputs import HEADER, add_note_headers, request_id_of
from jaxserve.http.listener import Handler
from jaxserve.http.paths import path_hint, style_of_path, with_slash
from jaxserve.http.state import STATE, ServerState
from jaxserve.http.tracing import tracing_middleware
from jaxserve.tenants import HTTP_REQUEST_ID, TENANT

_log = logging.getLogger(__name__)

_PUBLIC = web.AppKey("public_resources", frozenset)
_OPERATION = web.AppKey("operation_resources", frozenset)
"""Routes that answer on surplus connections as well: the operator needs them most when the server is full."""
_COMMANDS = web.AppKey("command_resources", frozenset)
"""Routes that change the engine, for the operator."""
_STYLES = web.AppKey("styles", Mapping[web.AbstractResource, ApiStyle])
"""Styles of resources that do not follow OpenAI's."""
_PATH_STYLES = web.AppKey("path_styles", Mapping[str, ApiStyle])
"""Styles of paths that do not follow OpenAI's."""


def collect_routes() -> list[Route]:
    """Return the routes of every module below `apis/` and of `http/operations/`."""
    modules = [
        importlib.import_module(module.name)
        for package in (jaxserve.apis, jaxserve.http.operations)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    return [found for module in modules for found in vars(module).values() if isinstance(found, Route)]


def make_app(state: ServerState) -> web.Application:
    """Return the application; its caller closes what `state` holds."""
    app = web.Application(client_max_size=state.max_body_size, middlewares=[_boundary, _preflight, _limit, _guard])
    app[STATE] = state
    app[ROUTES] = tuple(collect_routes())
    public, operation, commands = set(), set(), set()
    styles: dict[web.AbstractResource, ApiStyle] = {}
    served = [(route, path) for route in app[ROUTES] for path in (route.path, with_slash(route)) if path is not None]
    for route, path in served:
        resource, handler = app.router.add_resource(path), handler_of(route)
        for method in ("GET", "HEAD") if route.method == "GET" else (route.method,):
            resource.add_route(method, handler)
        if route.is_public or (route.path == "/metrics" and state.has_public_metrics):
            public.add(resource)
        if route.tag == "Operation":
            operation.add(resource)
        if route.is_command:
            commands.add(resource)
        if route.style != ApiStyle():
            styles[resource] = route.style
    app[_PUBLIC] = frozenset(public)
    app[_OPERATION] = frozenset(operation)
    app[_COMMANDS] = frozenset(commands)
    app[_STYLES] = MappingProxyType(styles)
    app[_PATH_STYLES] = MappingProxyType(
        {route.path: route.style for route in app[ROUTES] if route.style != ApiStyle()}
    )
    app.on_response_prepare.append(_add_headers)
    if state.tracing is not None:
        untraced = frozenset(public | operation)
        app.middlewares.insert(0, tracing_middleware(state.tracing, untraced, request_id_of, failed_status_of))
    return app


@web.middleware
async def _boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
    state = request.app[STATE]

    began_s = time.monotonic()
    USAGE.set(Usage())
    resource = request.match_info.route.resource
    route = "none" if resource is None else resource.canonical.rstrip("/") or "/"
    shown: list[RequestError] = []

    def body(error: RequestError) -> msgspec.Struct:
        shown.append(error)
        return _style_of(request).error_body(error, request_id_of(request))

    try:
        response = await handler(request)
    except RequestError as error:
        response = error_response(error, body=body)
    except web.HTTPException as error:
        routes = request.app[ROUTES]
        hint = path_hint(request.path, routes) if error.status in (404, 405) else None
        response = response_from_http_error(error, request, state.max_body_size, body, hint)
    except ConnectionResetError:
        raise
    except Exception as error:
        response = error_response(hide_internal_error(error, request_id_of(request)), body=body)
    status = failed_status_of(request) or response.status
    if status >= 400 and (status < 500 or resource not in request.app[_OPERATION]):  # probes get 503 again and again
        place = f"{request.method} {'an unknown path' if resource is None else route}"
        state.rejections.note(place, status, shown[-1] if shown else None)
    _note(request, route, status, time.monotonic() - began_s)
    if state.models.first.client.is_draining or connection_of(request).is_surplus:
        response.force_close()  # a client that keeps connections must find another server
    return response


def _note(request: web.Request, route: str, status: int, seconds: float) -> None:
    """Count a request that has been answered, and log it if wanted."""
    state = request.app[STATE]
    state.models.first.metrics.inc("http_requests", route=route, status=str(status))
    state.models.first.metrics.observe("http_request_duration_seconds", seconds)
    if state.logs_access:
        tenant, usage = TENANT.get(), USAGE.get() or Usage()
        _log.info(
            "%s %s %d %.1f ms id=%s key=%s prompt_tokens=%d completion_tokens=%d",
            request.method,
            request.rel_url.raw_path,  # a decoded one may have spaces, and so further fields
            status,
            1000 * seconds,
            request_id_of(request),
            "-" if tenant is None else tenant.record.name or "-",
            usage.num_prompt,
            usage.num_completion,
        )


@web.middleware
async def _preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer preflight requests, which browsers send without the key."""
    if request.method != "OPTIONS":
        return await handler(request)
    headers = request.app[STATE].cors.preflight_headers(request.headers)
    return await handler(request) if headers is None else web.Response(status=204, headers=headers)


@web.middleware
async def _limit(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.match_info.route.resource not in request.app[_OPERATION]:
        connection_of(request).check_limit()
    return await handler(request)


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let requests pass that carry a key, within the limits of the key; all of those on the operator's socket."""
    state, resource = request.app[STATE], request.match_info.route.resource
    HTTP_REQUEST_ID.set(request_id_of(request))
    TENANT.set(None)
    if resource in request.app[_PUBLIC] or connection_of(request).is_operators:
        return await handler(request)
    headers, tenant = request.headers, None
    if not state.keys.is_open:
        tenant = state.keys.check(headers.get("Authorization"), headers.get("X-Api-Key", headers.get("Api-Key")))
    elif state.is_local:
        _check_host(request)
        _check_page(request)
    is_operator = state.allows_commands or (tenant is not None and tenant.record.is_operator)
    if resource in request.app[_COMMANDS] and not is_operator:
        raise OperatorError(
            "This command is for the operator: use --admin-socket, a key with `is_operator`, or --public-commands."
        )
    if tenant is None or resource in request.app[_OPERATION]:
        return await handler(request)
    TENANT.set(tenant)
    with ExitStack() as admission:
        admission.enter_context(tenant.admitted())
        request[ADMISSION] = admission
        return await handler(request)


def _check_host(request: web.Request) -> None:
    """Raise OriginError for a name in `Host` that is not this host's own, on a server without keys on a loopback address.

    A web page reads replies of a server that has the page's name, and its owner can let that name resolve to 127.0.0.1.
    """
    host = request.headers.get("Host")
    if host is not None and not is_local_page(f"http://{host}"):
        raise OriginError(
            f"This server has no API key, so it answers as localhost only, not as {host[:200]!r} (--api-key, --behind-proxy)."
        )


def _check_page(request: web.Request) -> None:
    """Raise OriginError for web pages of other hosts that write to a server without keys on a loopback address.

    Browsers send such requests without asking if they have no body.
    """
    state, origin = request.app[STATE], request.headers.get("Origin")
    if origin is None or request.method in ("GET", "HEAD"):
        return
    if not is_local_page(origin) and not state.cors.headers(request.headers):
        raise OriginError(
            f"Web pages of the origin {origin[:200]!r} may not call this server (--cors-allowed-origins, --api-key)."
        )


def _style_of(request: web.Request) -> ApiStyle:
    resource = request.match_info.route.resource
    if resource is None:
        return style_of_path(request.path, request.app[_PATH_STYLES])
    return request.app[_STYLES].get(resource, ApiStyle())


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    if connection_of(request).closes_after_reply:
        response.force_close()
        response.headers["Connection"] = "close"
    response.headers["Server"] = "jaxserve"
    response.headers[HEADER] = request_id_of(request)
    if "Origin" in request.headers:
        response.headers.update(request.app[STATE].cors.headers(request.headers))
    own_header = _style_of(request).request_id_header
    if own_header is not None:
        response.headers[own_header] = request_id_of(request)
    add_note_headers(request, response)
