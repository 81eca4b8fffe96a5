"""The Vercel AI SDK, with its providers for OpenAI's and for Anthropic's API, where node and npm are found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.lane import AFTER_RESULTS, require_lane
from tests.clients.node_scripts import requires, run
from tests.clients.questions import ANSWER, MODEL
from tests.e2e.http_server import Server

require_lane()

pytestmark = requires("ai")


@pytest.fixture(scope="module", params=["openai-compatible", "anthropic"])
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def seen(smollm2: Server, provider: str) -> Any:
    """The results of scripts that one process ran with the default model."""
    return run("ai.mjs", provider, "chat", "object", "force", "errors", server=smollm2, model=MODEL)


def test_plain_and_streamed_text(seen: Any) -> None:
    chat = seen["chat"]
    assert chat["plain"] == "".join(chat["deltas"]) == ANSWER
    assert len(chat["deltas"]) > 2
    assert chat["finishReason"] == "stop"
    assert chat["tokens"] == [8, 8]


def test_objects(seen: Any) -> None:
    assert seen["object"] == [{"city": "Paris"}] * 2


def test_the_default_model_calls_a_function_that_it_must(seen: Any) -> None:
    assert seen["force"] == {"toolName": "name_capital", "input": {"city": "Paris"}}


def test_errors_say_what_the_server_said(seen: Any) -> None:
    missing, too_long = seen["errors"]
    assert missing[:2] == ["AI_APICallError", 404]
    assert "gpt-9" in missing[2]
    assert too_long[:2] == ["AI_APICallError", 400]
    assert "1024" in too_long[2]


def test_tools_are_called_and_their_results_answered(tools: Server, provider: str) -> None:
    agent = run("ai.mjs", provider, "agent", server=tools, model="tiny")["agent"]
    assert agent["streamed"] == agent["plain"]
    calling, answering = agent["plain"]
    assert calling["reasoningText"] == "The user wants the weather."
    assert calling["results"] == ['sunny in Paris, café "x"', "noon"]
    assert (answering["text"], answering["results"]) == (AFTER_RESULTS, [])
