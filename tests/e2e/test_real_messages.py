"""SmolLM2 as Anthropic's clients see it: its answers, and calls that a grammar holds a small model to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.http_server import Server
from tests.e2e.real_server import serving_smollm2
from tests.e2e.test_http_tools import TEMPLATE

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "The weather of a city.",
        "strict": True,
        "input_schema": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 5},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    }
]


@pytest.fixture(scope="module")
def server(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE.replace("'<|im_end|>'", "'<|im_end|>\\n'"))
    flags = ("--tool-call-parser", "hermes", "--chat-template", str(template))
    with serving_smollm2(*flags, programs=programs) as running:
        yield running
        assert "Traceback" not in running.output, running.output


def ask(server: Server, path: str = "/v1/messages", **fields: Any) -> Any:
    body = {"max_tokens": 64, "messages": QUESTION, "temperature": 0} | fields
    status, _, raw = server.request("POST", path, body)
    assert status == 200, raw
    return json.loads(raw)


def test_answers_are_those_of_chat(server: Server) -> None:
    reply = ask(server)
    chat = ask(server, "/v1/chat/completions")["choices"][0]
    assert [block["text"] for block in reply["content"]] == [chat["message"]["content"]]
    assert "Paris" in reply["content"][0]["text"]
    assert (reply["stop_reason"], chat["finish_reason"]) == ("end_turn", "stop")


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}]
)
def test_forced_input_obeys_the_schema(server: Server, choice: dict[str, Any]) -> None:
    reply = ask(server, tools=TOOLS, tool_choice=choice)
    (call,) = reply["content"]
    assert (call["type"], call["name"], reply["stop_reason"]) == ("tool_use", "get_weather", "tool_use")
    assert call["input"]["city"] in ("Paris", "Rome")
    assert call["input"]["days"] in range(1, 6)
