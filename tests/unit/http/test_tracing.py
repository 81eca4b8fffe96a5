"""Traces of requests: the spans of a choice and their times, the client's trace, and what is not traced."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from jaxserve.errors import ConfigError
from jaxserve.http.tracing import Tracing, open_tracing
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.running_api import Api, running_api

BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0.5}
CHAT = "/v1/chat/completions"
TRACE = "0af7651916cd43dd8448eb211c80319c"


@contextlib.asynccontextmanager
async def traced(tokenizer: Tokenizer) -> AsyncIterator[tuple[Api, InMemorySpanExporter]]:
    spans = InMemorySpanExporter()
    async with running_api(tokenizer, tracing=Tracing(SimpleSpanProcessor(spans))) as api:
        yield api, spans


def named(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    (found,) = (span for span in spans.get_finished_spans() if span.name == name)
    return found


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_reply_has_a_span_for_the_request_its_choice_and_its_phases(tokenizer: Tokenizer) -> None:
    async with traced(tokenizer) as (api, spans):
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "X-Request-Id": "mine"}
        reply = asyncio.create_task(api.post(CHAT, BODY, headers=headers))
        request = await api.engine.added()
        api.engine.output(request, [5, 6], queue_seconds=0.0)
        api.engine.output(request, [7], finish_reason="length")
        assert (await reply)[0] == 200
        server, choice = named(spans, f"POST {CHAT}"), named(spans, "chat tiny")
        assert server.context is not None and choice.context is not None
        assert server.parent is not None and format(server.context.trace_id, "032x") == TRACE
        assert attributes(server)["http.response.status_code"] == 200
        assert attributes(server)["jaxserve.request_id"] == "mine"
        assert choice.parent is not None and choice.parent.span_id == server.context.span_id
        found = attributes(choice)
        assert found["gen_ai.usage.output_tokens"] == 3
        assert found["gen_ai.usage.input_tokens"] == len(request.prompt_token_ids)
        assert found["gen_ai.response.finish_reasons"] == ("length",)
        assert found["gen_ai.request.temperature"] == 0.5
        assert found["jaxserve.engine_request_id"] == request.request_id
        phases = [named(spans, name) for name in ("queue", "prefill", "decode")]
        for phase in phases:
            assert phase.parent is not None and phase.parent.span_id == choice.context.span_id
        times = [time or 0 for phase in phases for time in (phase.start_time, phase.end_time)]
        assert [choice.start_time, *times, choice.end_time] == sorted(
            [choice.start_time or 0, *times, choice.end_time or 0]
        )


async def test_an_id_in_the_body_is_that_of_the_reply_of_the_span_and_in_the_engine(tokenizer: Tokenizer) -> None:
    async with traced(tokenizer) as (api, spans):
        reply = asyncio.ensure_future(api.http.post(CHAT, json=BODY | {"request_id": "from-the-body"}))
        request = await api.engine.added()
        api.engine.output(request, [5], finish_reason="length")
        async with await reply as response:
            assert response.headers["X-Request-Id"] == "from-the-body"
            await response.read()
        assert request.request_id.startswith("from-the-body:")
        assert attributes(named(spans, f"POST {CHAT}"))["jaxserve.request_id"] == "from-the-body"


async def test_a_refused_request_has_a_span_with_its_status_and_operation_has_none(tokenizer: Tokenizer) -> None:
    async with traced(tokenizer) as (api, spans):
        assert (await api.post(CHAT, BODY | {"n": 0}))[0] == 400
        for path in ("/health", "/metrics", "/nowhere"):
            async with api.http.get(path) as response:
                await response.read()
        (only,) = spans.get_finished_spans()
        assert attributes(only)["http.response.status_code"] == 400


async def test_a_stream_that_fails_after_its_status_line_has_a_span_with_an_error(tokenizer: Tokenizer) -> None:
    async with traced(tokenizer) as (api, spans):
        async with api.http.post(CHAT, json=BODY | {"stream": True}) as response:
            request = await api.engine.added()
            api.engine.output(request, [5])
            await response.content.readany()
            api.engine.output(request, [], finish_reason="error")
            assert "error" in (await response.text())
        for _ in range(100_000):
            if len(spans.get_finished_spans()) >= 5:
                break
            await asyncio.sleep(0)
        server = named(spans, f"POST {CHAT}")
        assert attributes(server)["http.response.status_code"] == 200
        assert attributes(server)["error.type"] == "500"
        assert server.status.status_code is StatusCode.ERROR


async def test_a_client_that_leaves_ends_its_spans(tokenizer: Tokenizer) -> None:
    async with traced(tokenizer) as (api, spans):
        reply = asyncio.create_task(api.post(CHAT, BODY))
        request = await api.engine.added()
        api.engine.output(request, [5], queue_seconds=0.0)
        reply.cancel()
        await asyncio.wait({reply})
        for _ in range(100_000):
            if len(spans.get_finished_spans()) == 5:
                break
            await asyncio.sleep(0)
        assert attributes(named(spans, "chat tiny"))["gen_ai.response.finish_reasons"] == ("abort",)


def test_settings_that_the_sdk_refuses_end_the_start_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    with pytest.raises(ConfigError, match=r"OTEL_\*.*max_queue_size"):
        open_tracing("http://127.0.0.1:1/v1/traces")


def test_without_a_collector_nothing_is_traced() -> None:
    assert open_tracing(None) is None
