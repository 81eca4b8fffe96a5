"""Tools with chat templates that have no place for them: messages explain them and show calls and results."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jaxserve.frontend.parsers.explained_tools import with_explained_tools
from jaxserve.frontend.parsers.output_format import choose_output_format
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.apis.test_replies import EOS, play
from tests.unit.apis.test_tools import prompt_of
from tests.unit.running_api import Api, running_api

CHAT = "/v1/chat/completions"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather", "parameters": {"type": "object"}},
    }
]
USER = {"role": "user", "content": "The weather in Paris?"}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
FORMAT = choose_output_format([], "auto", "none", takes_tools=False)


async def ask(api: Api, reply: str, **fields: Any) -> tuple[dict[str, Any], str, str | None]:
    """The reply to a chat, the prompt that the engine got, and the header of the format."""

    async def post() -> tuple[dict[str, Any], str | None]:
        async with api.http.post(CHAT, json={"messages": [USER]} | fields) as response:
            assert response.status == 200, await response.text()
            return await response.json(), response.headers.get("x-jaxserve-tool-format")

    tokens = [*api.tokenizer.encode(reply, False), EOS]
    (body, header), request = await asyncio.gather(post(), play(api, [tokens], finish_reason="stop"))
    return body["choices"][0], prompt_of(api, request), header


@pytest.mark.parametrize("text", [CALL, '{"name": "get_weather", "arguments": {"city": "Paris"}}'])
async def test_tools_are_explained_and_calls_are_read(tokenizer: Tokenizer, text: str) -> None:
    async with running_api(tokenizer, output_format=FORMAT, max_model_len=4000) as api:
        choice, prompt, header = await ask(api, text, tools=TOOLS)
        assert '{"name":"get_weather","description":"The weather","parameters":{"type":"object"}}' in prompt
        assert prompt.index("You can call functions") < prompt.index(USER["content"])
        call = choice["message"]["tool_calls"][0]["function"]
        assert (call["name"], choice["finish_reason"], header) == ("get_weather", "tool_calls", "generic")
        choice, prompt, header = await ask(api, text, tools=TOOLS, tool_choice="none")
        assert "You can call functions" not in prompt
        assert header is None


async def test_calls_and_results_of_the_history_are_shown(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, output_format=FORMAT, max_model_len=4000) as api:
        choice, prompt, _ = await ask(api, "It is sunny.", messages=[USER, CALLED, RESULT], tools=TOOLS)
        assert choice["message"]["content"] == "It is sunny."
        assert '<tool_call>\n{"name":"get_weather","arguments":{"city":"Paris"}}\n</tool_call>' in prompt
        assert "<tool_response>\nget_weather:\nsunny\n</tool_response>" in prompt


def test_a_template_without_system_messages_gets_the_explanation_from_the_user() -> None:
    messages = with_explained_tools([USER], TOOLS, takes_system=False)
    assert [message["role"] for message in messages] == ["user"]
    assert messages[0]["content"].endswith(USER["content"])
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    messages = with_explained_tools([system, USER], TOOLS, takes_system=True)
    assert messages[0]["content"].startswith("Be brief.\n\nYou can call functions.")
    assert system["content"] == [{"type": "text", "text": "Be brief."}]


def test_neighbouring_results_are_one_message() -> None:
    messages = with_explained_tools([USER, CALLED, RESULT, RESULT | {"content": "hot"}, USER], [], takes_system=True)
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "user"]
    assert messages[2]["content"].count("<tool_response>") == 2


def test_images_of_results_and_of_users_keep_their_places() -> None:
    image, hot = {"type": "image"}, {"type": "text", "text": "hot"}
    seen = RESULT | {"content": [image, hot, hot], "name": "look"}
    user = {"role": "user", "content": [image, {"type": "text", "text": "This?"}]}
    messages = with_explained_tools([user, CALLED, RESULT, seen, user], TOOLS, takes_system=False)
    assert [part["type"] for part in messages[0]["content"]] == ["text", "image", "text"]
    assert messages[0]["content"][0]["text"].startswith("You can call functions")
    assert messages[2]["content"] == [
        {"type": "text", "text": "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nlook:\n"},
        image,
        {"type": "text", "text": "hot\nhot\n</tool_response>"},
    ]
    assert messages[3] == user


async def test_only_the_flag_turns_tools_off(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, output_format=choose_output_format([], "none", "none")) as api:
        status, reply = await api.post(CHAT, {"messages": [USER], "tools": TOOLS})
        assert (status, reply["error"]["param"]) == (400, "tools")
        assert "--tool-call-parser none" in reply["error"]["message"]
