"""Health, readiness, start-up report, version and metrics, for the operator."""

from __future__ import annotations

from functools import partial

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from jaxserve import __version__
from jaxserve.apis.routes import Call, Encoded, Route
from jaxserve.errors import UnavailableError
from jaxserve.http.handler import HttpCall
from jaxserve.http.operations.schema import Draining, Healthy, Loading, Ready, Started, Unhealthy, VersionReply
from jaxserve.http.operations.startup import startup_reply


@partial(Route, "GET", "/health", is_public=True, tag="Operation", reply=Healthy, other_replies=((503, Unhealthy),))
async def health(call: Call) -> Healthy | Encoded:
    """Report the health of the server: 503 once the engine is unhealthy, or dead for good."""
    ailment = call.frontend.client.ailment()
    return Healthy() if ailment is None else _unavailable(Unhealthy(ailment))


@partial(
    Route,
    "GET",
    "/ready",
    is_public=True,
    tag="Operation",
    reply=Ready,
    other_replies=((503, Unhealthy | Draining | Loading),),
)
async def ready(call: HttpCall) -> Ready | Encoded:
    """Report the readiness of the server: 503 while loading, draining, or without an engine."""
    if call.frontend.client.is_ready and call.frontend.tokenization.is_installed:
        return Ready()
    return _unavailable(_reason(call), {"Retry-After": str(UnavailableError.retry_after_s)})


def _reason(call: HttpCall) -> Unhealthy | Draining | Loading:
    client = call.frontend.client
    ailment = client.ailment()
    if ailment is not None:
        return Unhealthy(ailment)
    return Draining() if client.is_draining else call.state.startup.under_way()


def _unavailable(reply: msgspec.Struct, headers: dict[str, str] | None = None) -> Encoded:
    return Encoded(body=msgspec.json.encode(reply), status=503, headers=headers or {})


@partial(Route, "GET", "/startup", tag="Operation", reply=Started | Loading)
async def startup(call: HttpCall) -> Started | Loading:
    """Report the times of the start, or its progress."""
    model_info, log = call.frontend.client.model_info, call.state.startup
    if model_info is None:
        return log.under_way()
    return startup_reply(log.spans(model_info.startup), model_info.startup)


@partial(Route, "GET", "/version", is_public=True, tag="Operation", reply=VersionReply)
async def version(call: Call) -> VersionReply:
    """Report the version of jaxserve."""
    return VersionReply(__version__)


@partial(Route, "GET", "/metrics", tag="Operation", media_type="text/plain")
async def metrics(call: HttpCall) -> Encoded:
    """Report metrics for Prometheus, summed over all API processes."""
    body = await call.state.peers.exposition(call.frontend.metrics)
    return Encoded(body=body, media_type=CONTENT_TYPE_LATEST)
