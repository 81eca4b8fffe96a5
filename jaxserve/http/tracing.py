"""Traces of requests for OpenTelemetry (--otlp-traces-endpoint): the HTTP request, its choices, and their phases.

    POST /v1/chat/completions     kind server, child of the client's span if the request has a `traceparent` header (W3C)
      chat MODEL                  one for each choice, with attributes of OpenTelemetry's conventions for generative AI
        queue, prefill, decode    from arrival in the engine to the last token

Spans are sent by a thread, in batches; those that the collector does not take in time are dropped. Variables of the
OpenTelemetry SDK count: OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER and others.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from jaxserve import __version__
from jaxserve.errors import ConfigError
from jaxserve.frontend.choices.spans import REQUEST_SPAN, EndedChoice
from jaxserve.http.listener import Handler

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span, Tracer

_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
}
"""Values of `gen_ai.operation.name` by route."""


class Tracing:
    """Makes spans, and sends them until it is closed."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        own = {"service.version": __version__, "service.instance.id": f"{os.uname().nodename}:{os.getpid()}"}
        resource = Resource.create(own)
        if str(resource.attributes["service.name"]).startswith("unknown_service"):  # no variable names it
            resource = resource.merge(Resource({"service.name": "jaxserve"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("jaxserve", __version__)

    @contextlib.contextmanager
    def request(self, request: web.Request, route: str) -> Iterator[Span]:
        """Trace one HTTP request inside the block."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        span = self._tracer.start_span(
            f"{request.method} {route}",
            TraceContextTextMapPropagator().extract(_lower_case(request.headers)),
            SpanKind.SERVER,
            {
                "http.request.method": request.method,
                "http.route": route,
                "url.path": request.path,
            },
        )
        token = REQUEST_SPAN.set(_RequestSpan(self._tracer, span, _OPERATIONS.get(route, "inference")))
        try:
            yield span
        finally:
            REQUEST_SPAN.reset(token)
            span.end()

    def close(self) -> None:
        """Send what is left; waits for the collector, seconds at most."""
        self._provider.shutdown()


class _RequestSpan:
    """The span of one HTTP request, under which its choices appear."""

    def __init__(self, tracer: Tracer, span: Span, operation: str) -> None:
        self._tracer = tracer
        self._span = span
        self._operation = operation

    def add_choice(self, choice: EndedChoice) -> None:
        from opentelemetry.trace import StatusCode, set_span_in_context

        parent = set_span_in_context(self._span)
        since_1970_ns = time.time_ns() - time.monotonic_ns()

        def nanoseconds(monotonic_s: float) -> int:
            return since_1970_ns + int(monotonic_s * 1e9)

        span = self._tracer.start_span(
            f"{self._operation} {choice.model_name}",
            parent,
            attributes=self._attributes(choice),
            start_time=nanoseconds(choice.submitted_s),
        )
        if choice.finish_reason == "error":
            span.set_status(StatusCode.ERROR)
        below = set_span_in_context(span)
        for name, start_s, end_s in _phases(choice):
            phase = self._tracer.start_span(name, below, start_time=nanoseconds(start_s))
            phase.end(nanoseconds(end_s))
        span.end(nanoseconds(choice.ended_s))

    def _attributes(self, choice: EndedChoice) -> dict[str, Any]:
        sampling = choice.request.sampling
        found: dict[str, Any] = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "jaxserve",
            "gen_ai.request.model": choice.model_name,
            "gen_ai.response.model": choice.model_name,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.response.finish_reasons": [choice.finish_reason],
            "gen_ai.usage.input_tokens": len(choice.request.prompt_token_ids),
            "gen_ai.usage.cache_read.input_tokens": choice.num_cached_tokens,
            "gen_ai.usage.output_tokens": choice.num_tokens,
            "jaxserve.engine_request_id": choice.request.request_id,
        }
        if choice.first_token_s is not None:
            found["gen_ai.response.time_to_first_chunk"] = choice.first_token_s - choice.submitted_s
        return found


def open_tracing(endpoint: str | None) -> Tracing | None:
    """Return what sends traces to `endpoint`, the URL of a collector that takes OTLP over HTTP; None without one.

    Raises ConfigError if the packages are missing, or the SDK refuses its variables.
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError("--otlp-traces-endpoint: needs `pip install 'jaxserve[otel]'`") from None
    try:
        return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    except ValueError as error:
        raise ConfigError(f"--otlp-traces-endpoint: a variable OTEL_* is wrong: {error}") from error


def tracing_middleware(
    tracing: Tracing,
    untraced: frozenset[web.AbstractResource],
    request_id_of: Callable[[web.Request], str],
    failed_status_of: Callable[[web.Request], int | None],
) -> Any:
    """Return the middleware that traces the requests of all resources but those of `untraced`, and of unknown paths.

    failed_status_of: returns the status of the error that ended a stream after its status line.
    """

    @web.middleware
    async def trace(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None or resource in untraced:
            return await handler(request)
        with tracing.request(request, resource.canonical.rstrip("/")) as span:
            try:
                response = await handler(request)
            finally:
                span.set_attribute("jaxserve.request_id", request_id_of(request))  # the body may name it
            span.set_attribute("http.response.status_code", response.status)
            status = failed_status_of(request) or response.status
            if status >= 500:
                span.set_attribute("error.type", str(status))
                from opentelemetry.trace import StatusCode

                span.set_status(StatusCode.ERROR)
            return response

    return trace


def _phases(choice: EndedChoice) -> Iterator[tuple[str, float, float]]:
    """Yield name, begin and end of the phases that a choice went through."""
    if choice.queue_s is None:
        yield "queue", choice.submitted_s, choice.ended_s
        return
    started_s = min(choice.submitted_s + choice.queue_s, choice.ended_s)
    yield "queue", choice.submitted_s, started_s
    if choice.first_token_s is None:
        yield "prefill", started_s, choice.ended_s
        return
    yield "prefill", started_s, max(started_s, choice.first_token_s)
    yield "decode", choice.first_token_s, choice.ended_s


def _lower_case(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
