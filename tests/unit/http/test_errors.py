"""Every refusal has OpenAI's shape, a status that fits, and says no more than it should."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import ClientPayloadError, web

from jaxserve.apis.routes import Call, Reply, Route
from jaxserve.errors import REQUEST_ERRORS
from jaxserve.frontend import encode
from jaxserve.frontend.errors import request_error
from jaxserve.http.app import collect_routes
from jaxserve.http.errors import error_response
from jaxserve.http.paths import instead_of
from jaxserve.http.sse import EventStream
from jaxserve.ipc.messages import ErrorInfo, RequestOutput, StepOutputs
from jaxserve.scheduler.admission import error_info, queue_full
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.running_api import MAX_BODY_SIZE, MAX_MODEL_LEN, Api, running_api

JSON = {"Content-Type": "application/json"}


async def refusal(api: Api, method: str, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
    async with api.http.request(method, path, **options) as response:
        body = await response.json()
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert response.content_type == "application/json"
        assert response.headers["X-Request-Id"]
        return response.status, body["error"]


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "code"),
    [
        ("GET", "/v1/nope", {}, 404, "unknown_url"),
        ("GET", "/v1/chat/completions", {}, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", {}, 405, "method_not_allowed"),
        ("GET", "/v1/models/other", {}, 404, "model_not_found"),
        ("POST", "/v1/completions", {"json": {"model": "other", "prompt": "x"}}, 404, "model_not_found"),
        ("POST", "/v1/completions", {"data": b"{", "headers": JSON}, 400, "invalid_json"),
        ("POST", "/v1/completions", {"data": b"", "headers": JSON}, 400, "invalid_json"),
        ("POST", "/v1/completions", {"data": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, "unsupported_media_type"),
        ("POST", "/v1/completions", {"data": {"a": "b"}}, 415, "unsupported_media_type"),
        ("POST", "/v1/completions", {"data": b"{}", "headers": JSON | {"Content-Encoding": "gzip"}}, 415, "unsupported_media_type"),
        ("POST", "/v1/completions", {"data": b" " * (MAX_BODY_SIZE + 1), "headers": JSON}, 413, "payload_too_large"),
        ("POST", "/v1/completions", {"json": {"prompt": "x", "tools": [{}]}}, 400, "unsupported_parameter"),
        ("POST", "/detokenize", {"json": {"tokens": [400]}}, 400, "invalid_value"),
        ("POST", "/tokenize", {"json": {}}, 400, "invalid_value"),
        ("POST", "/detokenize", {"json": {}}, 400, "missing_required_parameter"),
    ],
)  # fmt: skip
async def test_refusal_has_shape_and_status(
    api: Api, method: str, path: str, options: dict[str, Any], status: int, code: str
) -> None:
    found, error = await refusal(api, method, path, **options)
    assert (found, error["code"]) == (status, code)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "instead"),
    [
        ("POST", "/v1/responses/compact", "ask for a summary with /v1/responses"),
        ("POST", "/v1/files", "send requests side by side"),
        ("GET", "/v1/batches/batch_1", "send requests side by side"),
        ("POST", "/v1/audio/transcriptions", "reads texts and images"),
        ("POST", "/api/chat", "use /v1/chat/completions"),
        ("GET", "/api/ps", "use /v1/chat/completions"),
        ("GET", "/props", "/tokenizer_info the chat template"),
        ("GET", "/slots/0", "/metrics show what runs"),
        ("POST", "/apply-template", "/tokenize with messages"),
        ("POST", "/v1/messages/batches", "send requests side by side"),
    ],
)
async def test_endpoints_of_other_servers_are_answered_with_what_to_use_instead(
    api: Api, method: str, path: str, instead: str
) -> None:
    async with api.http.request(method, path, json={}) as response:
        error = (await response.json())["error"]
    assert response.status == 404
    assert error["message"].startswith(f"This server does not have {method} {path}. ")
    assert instead in error["message"]


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/messages", "/api/v1/completions"])
async def test_a_path_without_its_version_is_answered_with_the_shortest_that_ends_so(api: Api, path: str) -> None:
    _, error = await refusal(api, "POST", path, json={})
    assert error["message"].endswith(f"Did you mean /v1{path.removeprefix('/api/v1')}?")


def test_no_endpoint_that_is_served_counts_as_one_of_other_servers() -> None:
    assert [route.path for route in collect_routes() if instead_of(route.path) is not None] == []


async def test_an_unknown_url_is_answered_with_the_page_of_known_ones(api: Api) -> None:
    _, error = await refusal(api, "GET", "/v2")
    assert error["message"] == "Unknown request URL: GET /v2. /docs lists the known ones."
    async with api.http.get("/docs") as page:
        assert page.status == 200


async def test_chunked_body_is_limited_too(api: Api) -> None:
    async def chunks() -> Any:
        for _ in range(40):
            yield b" " * 1024

    status, error = await refusal(api, "POST", "/v1/completions", data=chunks(), headers=JSON)
    assert (status, error["code"]) == (413, "payload_too_large")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("size", [MAX_MODEL_LEN + 1, 5000])
async def test_prompt_beyond_the_context_is_refused(api: Api, path: str, size: int) -> None:
    param = "messages" if "chat" in path else "prompt"
    prompt: Any = "!" * size
    body = {param: [{"role": "user", "content": prompt}] if param == "messages" else prompt}
    status, error = await refusal(api, "POST", path, json=body)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert error["message"].startswith(f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, ")


@pytest.mark.parametrize(
    ("field", "value", "param", "reason"),
    [
        (
            "messages",
            [{"role": "usr"}],
            "messages[0].role",
            "one of 'assistant', 'developer', 'system', 'tool', 'user'",
        ),
        ("reasoning_effort", "most", "reasoning_effort", "one of 'high', 'low', 'max', 'medium', 'minimal', 'none'"),
        ("reasoning_effort", "x" * 1000, "reasoning_effort", "xxx..."),
    ],
)
async def test_a_word_that_is_none_of_a_fields_words_is_refused_with_these(
    api: Api, field: str, value: Any, param: str, reason: str
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]} | {field: value}
    status, error = await refusal(api, "POST", "/v1/chat/completions", json=body)
    assert (status, error["param"]) == (400, param)
    assert reason in error["message"]
    assert len(error["message"]) < 330


async def test_output_beyond_the_context_is_refused(api: Api) -> None:
    status, error = await refusal(api, "POST", "/v1/completions", json={"prompt": [5, 6], "max_tokens": MAX_MODEL_LEN})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "66 tokens (2 in the prompt, 64 in the completion)" in error["message"]


async def test_token_id_outside_the_vocabulary_is_refused(api: Api) -> None:
    for token_ids in ([5, 400], [-1, 5], [2**70]):
        status, error = await refusal(api, "POST", "/v1/completions", json={"prompt": token_ids})
        assert (status, error["param"]) == (400, "prompt")
    assert api.client.admission.num_sequences == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "x" * 100}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 100}]}, "messages"),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x" * 100}]}, "messages"),
    ],
)
async def test_tokens_of_a_text_for_no_context_are_bounded(
    api: Api, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    monkeypatch.setattr(encode, "MAX_LISTED_TOKENS", 20)
    async with api.http.post(path, json=body) as response:
        error = (await response.json())["error"]
        assert response.status == 400
    assert f"Invalid value for '{param}': at most 20 tokens are listed, got 1" in error["message"]
    monkeypatch.setattr(encode, "MAX_LISTED_TOKENS", 300)
    async with api.http.post(path, json=body) as response:
        assert response.status == 200


async def test_unready_server_refuses_with_retry_after(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, is_ready=False) as api:
        async with api.http.post("/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"]
            assert (await response.json())["error"]["type"] == "service_unavailable"
        async with api.http.get("/ready") as response:
            assert response.status == 503
            waiting_for = {"phase": "start", "done": 0, "total": 1, "eta_seconds": None}
            assert await response.json() == {"status": "loading", **waiting_for}
        async with api.http.get("/health") as response:
            assert response.status == 503
            async with api.http.get("/live") as response:
                assert response.status == 200


async def test_full_queue_is_429_with_retry_after(api: Api) -> None:
    async with api.http.post("/v1/completions", json={"prompt": "x", "n": 9}) as response:
        assert response.status == 429
        assert response.headers["Retry-After"] == "1"
        error = (await response.json())["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "at most 8 may" in error["message"], "3 run by the engine's word, 5 wait by the settings"
    assert api.metrics.value("admission_rejections", reason="queue_full") == 1


@pytest.mark.parametrize("body", [{"prompt": "x"}, {"prompt": "x", "n": 2}], ids=["one choice", "two"])
async def test_request_that_the_engine_rejects_counts_as_rejected_and_has_no_times(
    api: Api, body: dict[str, Any]
) -> None:
    """With several API processes the engine rejects what is too much for all of them."""
    reply = asyncio.create_task(api.post("/v1/completions", body))
    requests = [await api.engine.added() for _ in range(body.get("n", 1))]
    full = queue_full(9, 9)
    assert full is not None
    error = error_info(full)
    api.engine.say(
        StepOutputs([RequestOutput(each.request_id, [], finish_reason="error", error=error) for each in requests])
    )
    assert (await reply)[0] == 429
    assert api.metrics.value("admission_rejections", reason="queue_full") == 1, "of HTTP requests"
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens"):
        assert api.metrics.value(name) == 0
    assert api.metrics.value("request_success", finished_reason="error") >= 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ("/v1/responses", {"input": "x"}),
    ],
)
async def test_full_queue_costs_no_tokenization(
    api: Api, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: calls.append("encode"))
    monkeypatch.setattr(Tokenizer, "encode_chat", lambda *_, **__: calls.append("encode_chat"))
    with api.client.admission.places(8):
        assert (await api.post(path, body))[0] == 429
    assert calls == []


async def test_unexpected_exception_tells_nothing(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(call: Call) -> Reply:
        raise OSError(2, "No such file", "/secret/path")

    route = Route("GET", "/version", broken, True, summary="Fails.", tag="Operation")
    monkeypatch.setattr("jaxserve.http.operations.status.version", route)
    async with running_api(tokenizer) as api:
        status, error = await refusal(api, "GET", "/version", headers={"X-Request-Id": "id-7"})
    assert (status, error["type"], error["code"]) == (500, "server_error", "internal_error")
    assert "secret" not in error["message"]
    assert "id-7" in error["message"]


async def test_client_that_left_between_two_writes_is_no_error(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def left_alone(request: web.Request, route: Route, reply: Reply) -> web.StreamResponse:
        events = EventStream(request)
        await events.send([b"data: 1\n\n"])
        assert request.transport is not None
        request.transport.close()
        await events.send([b"data: 2\n\n"])
        return events.response

    async with running_api(tokenizer) as api:
        with monkeypatch.context() as patch:
            patch.setattr("jaxserve.http.handler.send", left_alone)
            async with api.http.get("/version") as response:
                with pytest.raises(ClientPayloadError):
                    await response.read()
        assert (await api.http.get("/health")).status == 200
    assert caplog.records == []


@pytest.mark.parametrize("name", sorted(REQUEST_ERRORS))
def test_error_info_becomes_its_error_class(name: str) -> None:
    error = request_error(ErrorInfo(name, "text"))
    assert type(error).__name__ == name
    response = error_response(error)
    assert isinstance(response.body, bytes)
    assert b'"message":"text"' in response.body
    assert response.status == error.status


def test_unknown_error_class_becomes_an_internal_error() -> None:
    assert request_error(ErrorInfo("NoSuchError", "text")).status == 500
    assert request_error(None).status == 500


@pytest.mark.parametrize(
    ("sent", "is_echoed"),
    [("abc-123", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False), ("é", False)],
)
async def test_usable_request_id_is_echoed(api: Api, sent: str, is_echoed: bool) -> None:
    async with api.http.get("/version", headers={"X-Request-Id": sent}) as response:
        assert (response.headers["X-Request-Id"] == sent) == is_echoed


async def test_unknown_field_is_named_in_a_header(api: Api) -> None:
    body = {"prompt": "x", "max_tokens": 0, "echo": True, "foo": 1, "bar\r\nx": 2}
    async with api.http.post("/v1/completions", json=body) as response:
        assert response.status == 200
        assert response.headers["x-jaxserve-ignored"] == "foo"
