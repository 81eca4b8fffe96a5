"""The official SDK for Node, where node and npm are found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients import node_scripts
from tests.clients.lane import require_lane
from tests.clients.node_scripts import requires
from tests.e2e.http_server import Server

require_lane()

pytestmark = requires("openai")


def run(script: str, server: Server, model: str) -> Any:
    """Return the output of `chat.mjs SCRIPT`."""
    return node_scripts.run("chat.mjs", script, server=server, model=model)


def test_plain_and_streamed_chat(smollm2: Server) -> None:
    seen = run("chat", smollm2, "SmolLM2-135M-Instruct")
    assert seen["plain"] == "".join(seen["deltas"]) == "The capital of France is Paris."
    assert len(seen["deltas"]) > 2
    assert seen["usage"]["completion_tokens"] == seen["plainUsage"]["completion_tokens"] == 8
    assert seen["models"] == ["SmolLM2-135M-Instruct"]


def test_a_stream_that_is_left_ends_its_request(smollm2: Server) -> None:
    assert run("abandon", smollm2, "SmolLM2-135M-Instruct") == {"aborted": True}
    smollm2.await_metric("num_requests_running", 0)


def test_tool_calls_whole_and_streamed(tools: Server) -> None:
    seen = run("call", tools, "tiny")
    assert seen["streamed"] == seen["plain"]
    assert seen["plain"]["finish_reason"] == "tool_calls"
    assert seen["plain"]["calls"] == [["get_weather", {"city": "Paris", "note": 'café "x"'}], ["now", {}]]


def test_plain_and_streamed_response(smollm2: Server) -> None:
    seen = run("respond", smollm2, "SmolLM2-135M-Instruct")
    assert seen["plain"] == seen["final"] == "".join(seen["deltas"]) == "The capital of France is Paris."
    assert seen["status"] == "completed"


def test_embeddings(minilm: Server) -> None:
    seen = run("embed", minilm, "minilm")
    assert seen["sizes"] == [384, 384]
    assert seen["first"][0] == pytest.approx(seen["first"][1], abs=1e-6)


def test_errors_are_the_sdks_own_classes(smollm2: Server) -> None:
    assert run("errors", smollm2, "SmolLM2-135M-Instruct") == [
        ["NotFoundError", 404, "model_not_found"],
        ["BadRequestError", 400, "unsupported_parameter"],
        ["AuthenticationError", 401, "invalid_api_key"],
    ]
