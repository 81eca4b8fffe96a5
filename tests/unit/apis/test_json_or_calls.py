"""Tools together with a JSON format: a reply is calls, or JSON that the format allows, as agents with an output type ask."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from jaxserve.frontend.grammar_checker import GrammarChecker
from jaxserve.ipc.call_grammar import CallGrammar
from jaxserve.ipc.messages import Grammar
from tests.unit.apis.test_replies import CHAT, both, play
from tests.unit.apis.test_tools import BODY, CALLS, TOOLS, api, folded, steps, tooled
from tests.unit.running_api import Api

__all__ = ["api", "tooled"]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}}
ANSWERS = [
    '{"name":"now","arguments":{}}',
    '{"name":"<tool_call>\\n{\\"name\\": \\"now\\", \\"arguments\\": {}}\\n</tool_call>"}',
]
"""Answers that a parser of calls would take for calls."""


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check no grammar: that takes a process with the model's vocabulary."""

    async def check(_: GrammarChecker, grammar: Grammar, param: str) -> Grammar:
        return grammar

    monkeypatch.setattr(GrammarChecker, "check", check)


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("answer", ANSWERS)
async def test_an_answer_is_content_whatever_its_strings_say(api: Api, answer: str, size: int) -> None:
    tokens = [token for [token] in (api.tokenizer.encode(letter, False) for letter in answer)]
    outputs = [tokens[i : i + size] for i in range(0, len(tokens), size)] + steps(api, "")
    plain, chunks = await both(api, CHAT, BODY | FORMAT, outputs, finish_reason="stop")
    choice = plain["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (answer, "stop")
    assert "tool_calls" not in choice["message"]
    assert folded(chunks) == {"content": answer, "reasoning": "", "calls": []}


@pytest.mark.parametrize("size", [1, 1000])
async def test_calls_are_read_after_reasoning(api: Api, size: int) -> None:
    text = "<think>\nHm\n</think>\n\n" + CALLS.removeprefix("Wait.\n")
    plain, chunks = await both(api, CHAT, BODY | FORMAT, steps(api, text, size), finish_reason="stop")
    choice = plain["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather", "now"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert folded(chunks)["reasoning"] == "Hm"
    assert [call["name"] for call in folded(chunks)["calls"]] == ["get_weather", "now"]


async def grammar_of(api: Api, path: str, body: dict[str, Any]) -> CallGrammar:
    """Return the grammar that the engine gets for a request."""
    _, request = await asyncio.gather(api.post(path, body), play(api, steps(api, '{"name":"x"}'), finish_reason="stop"))
    grammar = request.grammar
    assert grammar is not None
    assert grammar.kind == "calls"
    return msgspec.json.decode(grammar.text, type=CallGrammar)


async def test_every_api_asks_for_both(api: Api) -> None:
    closed = SCHEMA | {"additionalProperties": False}
    function = TOOLS[0]["function"]
    chat = await grammar_of(api, CHAT, BODY | FORMAT)
    assert msgspec.json.decode(chat.answer) == closed
    assert [call[1].schema for call in chat.calls] == [{"type": "object"}] * 2
    asked = {
        "/v1/responses": {
            "input": "Hi",
            "tools": [{"type": "function"} | function],
            "text": {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}},
        },
        "/v1/messages": {
            "messages": BODY["messages"],
            "max_tokens": 100,
            "tools": [{"name": "now", "input_schema": {"type": "object"}}],
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    }
    for path, body in asked.items():
        assert msgspec.json.decode((await grammar_of(api, path, body)).answer) == closed
    forced = await grammar_of(api, CHAT, BODY | FORMAT | {"tool_choice": "required"})
    assert (forced.answer, forced.allows_text) == ("", False)


async def test_a_call_is_one_of_the_allowed_tools(api: Api) -> None:
    options = {"mode": "required", "tools": TOOLS[1:]}
    forced = await grammar_of(api, CHAT, BODY | {"tool_choice": {"type": "allowed_tools", "allowed_tools": options}})
    assert ["now" in str(call[0]) for call in forced.calls] == [True]
    assert not forced.allows_text


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("required", "tool_calls"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS}}, "tool_calls"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": TOOLS}}, "tool_calls"),
        ({"type": "function", "function": {"name": "now"}}, "stop"),
    ],
)
async def test_only_a_named_function_ends_its_call_with_stop(api: Api, choice: Any, reason: str) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    body = BODY | {"tool_choice": choice}
    plain, chunks = await both(api, CHAT, body, steps(api, call), finish_reason="stop")
    assert [call["function"]["name"] for call in plain["choices"][0]["message"]["tool_calls"]] == ["now"]
    assert plain["choices"][0]["finish_reason"] == reason
    assert chunks[-1]["choices"][0]["finish_reason"] == reason


async def test_a_format_that_is_no_json_is_refused_beside_tools(api: Api) -> None:
    status, reply = await api.post(CHAT, BODY | {"structured_outputs": {"regex": "a+"}})
    assert (status, reply["error"]["param"]) == (400, "structured_outputs.regex")
