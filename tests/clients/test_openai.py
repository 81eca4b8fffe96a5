"""The official Python SDK, as in the programs of users: the default model, with an API key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.clients.lane import API_KEY, library
from tests.clients.questions import ANSWER, MODEL, QUESTION, City
from tests.e2e.http_server import Server, running

openai = library("openai")
pydantic = library("pydantic")

TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("get_weather", "now")
]


@pytest.fixture(scope="module")
def client(smollm2: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key=API_KEY, max_retries=0) as opened:
        yield opened


def test_plain_and_streamed_chat(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    plain = client.chat.completions.create(**options)
    assert plain.choices[0].message.content == ANSWER
    assert plain.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == ANSWER
    assert len(chunks) > 3, "text comes as it is written"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens == 8


def test_plain_and_streamed_completion(client: openai.OpenAI) -> None:
    options: Any = {
        "model": MODEL,
        "prompt": "The capital of France is",
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": 2,
    }
    plain = client.completions.create(**options).choices[0]
    assert plain.text.startswith(" Paris")
    assert len(plain.logprobs.tokens) == 8
    assert all(len(top) == 2 for top in plain.logprobs.top_logprobs)
    streamed = client.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == plain.text


def test_raw_responses_have_headers_and_parse(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    raw = client.chat.completions.with_raw_response.create(**options, extra_headers={"X-Request-Id": "mine-1"})
    assert raw.headers["x-request-id"] == raw.request_id == "mine-1"
    assert raw.parse().choices[0].message.content == ANSWER
    with client.chat.completions.with_streaming_response.create(**options, stream=True) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"


async def test_async_requests_side_by_side(smollm2: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{smollm2.url}/v1", api_key=API_KEY, max_retries=0) as client:

        async def stream(seed: int) -> str:
            chunks = await client.chat.completions.create(
                model=MODEL, messages=QUESTION, max_tokens=16, seed=seed, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        async def plain(seed: int) -> str:
            reply = await client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=16, seed=seed)
            return reply.choices[0].message.content or ""

        streamed = await asyncio.gather(*(stream(seed) for seed in range(6)))
        assert streamed == await asyncio.gather(*(plain(seed) for seed in range(6)))
        assert len(set(streamed)) > 1


def test_parse_gives_pydantic_objects(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 64, "response_format": City}
    for parse in (client.chat.completions.parse, client.beta.chat.completions.parse):
        message = parse(**options).choices[0].message
        assert isinstance(message.parsed, City)
        assert message.refusal is None
    with client.chat.completions.stream(**options) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == message.parsed
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_a_reply_cut_short_is_not_parsed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=QUESTION, max_tokens=2, response_format=City)


@pytest.mark.parametrize("is_parallel", [True, False])
def test_tool_calls_whole_and_streamed(tools: Server, is_parallel: bool) -> None:
    options: Any = {"model": "tiny", "messages": QUESTION, "tools": TOOLS, "parallel_tool_calls": is_parallel}
    with openai.OpenAI(base_url=f"{tools.url}/v1", api_key="none", max_retries=0) as client:
        plain = client.chat.completions.create(**options).choices[0]
        calls = plain.message.tool_calls
        assert [call.function.name for call in calls] == ["get_weather", "now"][: 1 + is_parallel]
        assert plain.finish_reason == "tool_calls"
        with client.chat.completions.stream(**options) as stream:
            pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
            final = stream.get_final_completion().choices[0].message
        assert "".join(pieces) == "".join(call.function.arguments for call in calls)
        assert [call.function.arguments for call in final.tool_calls] == [call.function.arguments for call in calls]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in calls]
        history: Any = [*QUESTION, plain.message, *results]
        assert client.chat.completions.create(**options | {"messages": history}).choices[0].message.content


class Weather(pydantic.BaseModel):
    """The arguments of a strict function."""

    city: str
    note: str


def test_strict_functions_are_parsed(tools: Server) -> None:
    options: Any = {"model": "tiny", "messages": QUESTION, "parallel_tool_calls": False, "max_tokens": 600}
    options["tools"] = [openai.pydantic_function_tool(Weather, name="get_weather"), TOOLS[1]]
    with openai.OpenAI(base_url=f"{tools.url}/v1", api_key="none", max_retries=0) as client:
        message = client.chat.completions.create(**options).choices[0].message
        assert message.content == "One moment."
        [call] = message.tool_calls
        assert Weather.model_validate_json(call.function.arguments)
        options["tools"] = options["tools"][:1]  # all are strict, or the SDK refuses to parse
        [call] = client.chat.completions.parse(**options).choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather)


def test_errors_are_the_sdks_own_classes(smollm2: Server, client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as unsupported:
        create(model=MODEL, messages=QUESTION, web_search_options={})
    assert (unsupported.value.code, unsupported.value.param) == ("unsupported_parameter", "web_search_options")
    with pytest.raises(openai.BadRequestError) as too_long:
        create(model=MODEL, messages=[{"role": "user", "content": "word " * 2000}])
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-9", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.AuthenticationError) as stranger:
        client.with_options(api_key="sk-wrong").models.list()
    assert stranger.value.code == "invalid_api_key"
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_full_queue_is_a_rate_limit_that_clients_wait_for() -> None:
    busy = {"device_seconds": 0.02, "vocab_size": 389}
    with (
        running(busy, scheduler={"max_num_seqs": 1, "max_queued_requests": 1}) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(6) as pool,
    ):

        def ask(max_retries: int) -> str:
            options: Any = {"model": "tiny", "prompt": "x", "max_tokens": 20, "extra_body": {"ignore_eos": True}}
            try:
                return client.with_options(max_retries=max_retries).completions.create(**options).choices[0].text
            except openai.RateLimitError as error:
                return f"{error.code}, retry after {error.response.headers['retry-after']} s"

        refusal = "rate_limit_exceeded, retry after 1 s"
        assert refusal in pool.map(ask, [0] * 6)
        assert refusal not in pool.map(ask, [8] * 6)
