"""Health, readiness, start-up report, version and metrics, for the operator."""

from __future__ import annotations

from functools import partial

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from jaxserve import __version__
from jaxserve.apis.routes import Call, Encoded, Route
from jaxserve.apis.schema.common import ModelQuery
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
    """Report that the server runs, serves or not: 503 only once it has given up on all of its engines. For liveness probes."""
    failures = [frontend.client.failure for frontend in call.models]
    return Alive() if None in failures else _unavailable(Unhealthy(failures[-1] or ""))


_PROBE = partial(
    Route, "GET", is_public=True, tag="Operation", other_replies=((503, Unhealthy | Draining | Loading | Restarting),)
)


@partial(_PROBE, "/health", reply=Healthy)
async def health(call: HttpCall) -> Healthy | Encoded:
    """Report the health of the server: 200 only while requests for every model are served, else 503 with what it does instead."""
    obstacle = _obstacle(call)
    return Healthy() if obstacle is None else obstacle


@partial(_PROBE, "/ready", reply=Ready)
async def ready(call: HttpCall) -> Ready | Encoded:
    """Report the readiness of the server: 200 and 503 as `/health`, with `Retry-After`. For balancers."""
    obstacle = _obstacle(call)
    return Ready() if obstacle is None else obstacle


def _obstacle(call: HttpCall) -> Encoded | None:
    """Return the reply that says why the requests for a model are not served; None if those for all models are."""
    for frontend in call.models:
        client, ailment = frontend.client, frontend.client.ailment()
        if ailment is None and client.is_ready and frontend.tokenization.is_installed:
            continue
        reason: Unhealthy | Draining | Loading
        if ailment is not None:
            reason = Unhealthy(ailment)
        else:
            reason = Draining() if client.is_draining else call.state.startups[frontend.model_name].under_way()
        if call.models.are_several and not isinstance(reason, Draining):
            reason.model = frontend.model_name
        return _unavailable(reason, {"Retry-After": str(UnavailableError.retry_after_s)})
    return None


def _unavailable(reply: msgspec.Struct, headers: dict[str, str] | None = None) -> Encoded:
    return Encoded(body=msgspec.json.encode(reply), status=503, headers=headers or {})


@partial(Route, "GET", "/startup", tag="Operation", reply=Started | Loading | Restarting)
async def startup(call: HttpCall, query: ModelQuery) -> Started | Loading | Restarting:
    """Report the times of the start, or its progress."""
    call.frontend.require_model(query.model)
    model_info, log = call.frontend.client.model_info, call.state.startups[call.frontend.model_name]
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
    frontend = call.frontend
    body = await call.state.peers.exposition(frontend.metrics, is_ending=frontend.client.is_draining)
    return Encoded(body=body, media_type=CONTENT_TYPE_LATEST)
