"""Health, readiness, start-up report, version and metrics, for the operator."""

from __future__ import annotations

from functools import partial

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from jaxserve import __version__
from jaxserve.apis.routes import Call, Encoded, Route
from jaxserve.errors import UnavailableError
from jaxserve.http.handler import HttpCall
from jaxserve.http.operations.schema import (
    Alive,
    Draining,
    Healthy,
    Loading,
    Ready,
    Restarting,
    Started,
    Unhealthy,
    VersionReply,
)
from jaxserve.http.operations.startup import startup_reply


@partial(Route, "GET", "/live", is_public=True, tag="Operation", reply=Alive, other_replies=((503, Unhealthy),))
async def live(call: Call) -> Alive | Encoded:
    """Report that the server runs, serves or not: 503 only once it has given up on its engine. For liveness probes."""
    failure = call.frontend.client.failure
    return Alive() if failure is None else _unavailable(Unhealthy(failure))


_PROBE = partial(
    Route, "GET", is_public=True, tag="Operation", other_replies=((503, Unhealthy | Draining | Loading | Restarting),)
)


@partial(_PROBE, "/health", reply=Healthy)
async def health(call: HttpCall) -> Healthy | Encoded:
    """Report the health of the server: 200 only while requests are served, else 503 with what it does instead."""
    obstacle = _obstacle(call)
    return Healthy() if obstacle is None else obstacle


@partial(_PROBE, "/ready", reply=Ready)
async def ready(call: HttpCall) -> Ready | Encoded:
    """Report the readiness of the server: 200 and 503 as `/health`, with `Retry-After`. For balancers."""
    obstacle = _obstacle(call)
    return Ready() if obstacle is None else obstacle


def _obstacle(call: HttpCall) -> Encoded | None:
    """Return the reply that says why no request is served; None if they are."""
    client = call.frontend.client
    ailment = client.ailment()
    if ailment is None and client.is_ready and call.frontend.tokenization.is_installed:
        return None
    reason: msgspec.Struct
    if ailment is not None:
        reason = Unhealthy(ailment)
    else:
        reason = Draining() if client.is_draining else call.state.startup.under_way()
    return _unavailable(reason, {"Retry-After": str(UnavailableError.retry_after_s)})


def _unavailable(reply: msgspec.Struct, headers: dict[str, str] | None = None) -> Encoded:
    return Encoded(body=msgspec.json.encode(reply), status=503, headers=headers or {})


@partial(Route, "GET", "/startup", tag="Operation", reply=Started | Loading | Restarting)
async def startup(call: HttpCall) -> Started | Loading | Restarting:
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
