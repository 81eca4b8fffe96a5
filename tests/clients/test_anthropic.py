"""Anthropic's Python SDK, with an API key: the default model, and a fake one that emits reasoning and tool calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.lane import AFTER_RESULTS, API_KEY, library
from tests.clients.questions import ANSWER, MODEL, QUESTION, City
from tests.e2e.http_server import Server

anthropic = library("anthropic")

GREEDY: Any = {"model": MODEL, "max_tokens": 64, "messages": QUESTION, "extra_body": {"temperature": 0}}
TOOLS: Any = [{"name": name, "input_schema": {"type": "object"}} for name in ("get_weather", "now")]
ASKING: Any = {"model": "tiny", "max_tokens": 1000, "messages": [{"role": "user", "content": "The weather?"}]}
INPUT = {"city": "Paris", "note": 'café "x"'}


@pytest.fixture(scope="module")
def client(smollm2: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=smollm2.url, api_key=API_KEY, max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def caller(tools: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tools.url, api_key="none", max_retries=0) as opened:
        yield opened


def test_plain_and_streamed_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**GREEDY)
    assert [(block.type, block.text) for block in message.content] == [("text", ANSWER)]
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 8)
    assert message._request_id
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION)
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
    with client.messages.stream(**GREEDY) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == ANSWER
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 8)


def test_stop_sequences_limits_and_a_begun_reply(client: anthropic.Anthropic) -> None:
    stopped = client.messages.create(**GREEDY, stop_sequences=[" France"])
    assert (stopped.content[0].text, stopped.stop_reason) == ("The capital of", "stop_sequence")
    assert stopped.stop_sequence == " France"
    assert client.messages.create(**GREEDY | {"max_tokens": 2}).stop_reason == "max_tokens"
    begun = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    continued = client.messages.create(**GREEDY | {"messages": begun})
    assert continued.content[0].text == " Paris."


def test_replies_are_parsed(client: anthropic.Anthropic) -> None:
    message = client.messages.parse(**GREEDY, output_format=City)
    assert isinstance(message.parsed_output, City)


def test_the_served_model_is_listed(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_async_client_and_token_of_a_bearer(smollm2: Server) -> None:
    async def ask() -> list[Any]:
        async with anthropic.AsyncAnthropic(base_url=smollm2.url, auth_token=API_KEY, max_retries=0) as opened:
            return list(await asyncio.gather(*(opened.messages.create(**GREEDY) for _ in range(4))))

    assert {message.content[0].text for message in asyncio.run(ask())} == {ANSWER}


def test_mistakes_are_the_sdks_own_exceptions(client: anthropic.Anthropic, smollm2: Server) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**GREEDY | {"model": "other"})
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert missing.value.request_id == missing.value.body["request_id"]
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**GREEDY | {"max_tokens": -1})
    with (
        anthropic.Anthropic(base_url=smollm2.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(**GREEDY)


def check_blocks(message: Any) -> None:
    thinking, text, weather, now = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "The user wants the weather.")
    assert (text.type, text.text) == ("text", "One moment.")
    assert (weather.type, weather.name, weather.input) == ("tool_use", "get_weather", INPUT)
    assert (now.type, now.name, now.input) == ("tool_use", "now", {})
    assert message.stop_reason == "tool_use"
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens


@pytest.mark.parametrize("is_beta", [False, True])
def test_thinking_and_calls_plain_and_streamed(caller: anthropic.Anthropic, is_beta: bool) -> None:
    messages = caller.beta.messages if is_beta else caller.messages
    plain = messages.create(**ASKING, tools=TOOLS)
    check_blocks(plain)
    with messages.stream(**ASKING, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    check_blocks(final)
    assert final.content[0].signature == plain.content[0].signature
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)


def test_a_conversation_goes_on_with_results(caller: anthropic.Anthropic) -> None:
    first = caller.messages.create(**ASKING, tools=TOOLS)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "ok"}
        for block in first.content
        if block.type == "tool_use"
    ]
    history = [*ASKING["messages"], first.to_param(), {"role": "user", "content": results}]
    answer = caller.messages.create(**ASKING | {"messages": history}, tools=TOOLS)
    assert [(block.type, block.text) for block in answer.content] == [("text", AFTER_RESULTS)]
    assert answer.stop_reason == "end_turn"


def test_one_call_at_most(caller: anthropic.Anthropic) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = caller.messages.create(**ASKING, tools=TOOLS, tool_choice=choice)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
