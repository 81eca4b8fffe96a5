"""For those who run the server: its health, its start, its numbers."""

from __future__ import annotations

from functools import partial

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from jaxserve import __version__
from jaxserve.apis.routes import Route
from jaxserve.errors import UnavailableError
from jaxserve.http.operations.schema import Draining, Healthy, Loading, Ready, Started, Unhealthy, VersionReply
from jaxserve.http.operations.startup import startup_reply
from jaxserve.http.reply import json_reply
from jaxserve.http.state import STATE, ServerState


@partial(Route, "GET", "/health", is_public=True, tag="Operation", reply=Healthy, other_replies=((503, Unhealthy),))
async def health(request: web.Request) -> web.StreamResponse:
    """Whether this server is worth keeping: 503 once the engine is sick, or dead for good."""
    ailment = request.app[STATE].client.ailment()
    return json_reply(Healthy()) if ailment is None else json_reply(Unhealthy(ailment), status=503)


@partial(
    Route,
    "GET",
    "/ready",
    is_public=True,
    tag="Operation",
    reply=Ready,
    other_replies=((503, Unhealthy | Draining | Loading),),
)
async def ready(request: web.Request) -> web.StreamResponse:
    """Whether requests may be sent here: 503 while loading, draining, or without an engine."""
    state = request.app[STATE]
    if state.client.is_ready and state.tokenization.is_installed:
        return json_reply(Ready())
    return json_reply(_why_not(state), status=503, headers={"Retry-After": str(UnavailableError.retry_after_s)})


def _why_not(state: ServerState) -> Unhealthy | Draining | Loading:
    ailment = state.client.ailment()
    if ailment is not None:
        return Unhealthy(ailment)
    return Draining() if state.client.is_draining else state.startup.under_way()


@partial(Route, "GET", "/startup", tag="Operation", reply=Started | Loading)
async def startup(request: web.Request) -> web.StreamResponse:
    """What the start took, or how far it is."""
    state = request.app[STATE]
    model_info = state.client.model_info
    if model_info is None:
        return json_reply(state.startup.under_way())
    return json_reply(startup_reply(state.startup.spans(model_info.startup), model_info.startup))


@partial(Route, "GET", "/version", is_public=True, tag="Operation", reply=VersionReply)
async def version(request: web.Request) -> web.StreamResponse:
    """The version of jaxserve."""
    return json_reply(VersionReply(__version__))


@partial(Route, "GET", "/metrics", tag="Operation", media_type="text/plain")
async def metrics(request: web.Request) -> web.StreamResponse:
    """Numbers for Prometheus, summed over all API processes."""
    state = request.app[STATE]
    body = await state.peers.exposition(state.metrics)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
