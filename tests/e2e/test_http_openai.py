"""The official client as users call it, streaming and not, against real processes with a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.e2e.http_server import Server, running

CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me – 海 🐚?"}]
ALL_TEXT = {"vocab_size": 389, "num_blocks": 2048}
"""Nearly every token of the fake has a text; a prime, so that different seeds give different tokens."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(ALL_TEXT) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streamed_chat_equals_plain_chat(client: openai.OpenAI, temperature: float) -> None:
    options: Any = {"model": "tiny", "messages": CHAT, "max_tokens": 40, "temperature": temperature, "seed": 3}
    plain = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == plain.choices[0].message.content
    assert text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == plain.choices[0].finish_reason
    usage = chunks[-1].usage
    assert usage is not None
    assert plain.usage is not None
    assert usage.completion_tokens == plain.usage.completion_tokens
    assert usage.prompt_tokens == plain.usage.prompt_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_same_seed_same_text_alone_and_among_others(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        reply = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=30, seed=seed)
        return reply.choices[0].message.content

    alone = [ask(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(ask, range(6)))
    assert together == alone
    assert len(set(alone)) == 6


def test_three_choices_are_three_texts_and_count_once(client: openai.OpenAI) -> None:
    options: Any = {
        "model": "tiny",
        "messages": CHAT,
        "max_tokens": 12,
        "seed": 5,
        "n": 3,
        "extra_body": {"ignore_eos": True},
    }
    plain = client.chat.completions.create(**options)
    texts = [choice.message.content for choice in plain.choices]
    assert [choice.index for choice in plain.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    one = client.chat.completions.create(**(options | {"n": 1}))
    assert one.choices[0].message.content == texts[0]
    assert plain.usage is not None
    assert one.usage is not None
    assert plain.usage.completion_tokens == 36
    assert plain.usage.prompt_tokens == one.usage.prompt_tokens
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_list_of_prompts_equals_single_prompts(client: openai.OpenAI) -> None:
    prompts = ["She sells", "sea shells", "by the sea"]
    options: Any = {"model": "tiny", "max_tokens": 10, "temperature": 0}
    batch = client.completions.create(prompt=prompts, **options)
    single = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in prompts]
    assert [choice.text for choice in batch.choices] == single
    assert [choice.index for choice in batch.choices] == [0, 1, 2]


def test_token_ids_equal_their_text(client: openai.OpenAI, server: Server) -> None:
    tokens = [40, 50, 60, 70]
    options: Any = {"model": "tiny", "max_tokens": 10, "temperature": 0}
    by_ids = client.completions.create(prompt=tokens, **options)
    by_lists = client.completions.create(prompt=[tokens, tokens], **options)
    assert {choice.text for choice in by_lists.choices} == {by_ids.choices[0].text}


@pytest.mark.parametrize("length", [1, 3])
def test_stop_string_cuts_at_its_first_match(client: openai.OpenAI, length: int) -> None:
    options: Any = {
        "model": "tiny",
        "prompt": "shells",
        "max_tokens": 60,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**options).choices[0].text
    middle = len(whole) // 2
    stop = whole[middle : middle + length]
    cut = client.completions.create(stop=[stop], **options)
    expected = whole[: whole.index(stop)]
    assert cut.choices[0].text == expected
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].to_dict()["stop_reason"] == stop
    streamed = client.completions.create(stop=[stop], stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected


def test_logprobs_cover_every_token(client: openai.OpenAI) -> None:
    options: Any = {
        "model": "tiny",
        "messages": CHAT,
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 3,
        "temperature": 0,
    }
    reply = client.chat.completions.create(**options)
    assert reply.usage is not None
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == reply.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 for entry in logprobs.content)
    chunks = client.chat.completions.create(stream=True, **options)
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or ()]
    assert [entry.to_dict() for entry in streamed] == [entry.to_dict() for entry in logprobs.content]


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=CHAT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(model="tiny", messages=CHAT, web_search_options={})
    assert (unsupported.value.code, unsupported.value.param) == ("unsupported_parameter", "web_search_options")
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="tiny", prompt=[5] * 2048)
    assert too_long.value.code == "context_length_exceeded"


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").to_dict()["max_model_len"] == 2048


async def test_async_streams_side_by_side(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        async def stream(seed: int) -> str:
            chunks = await client.chat.completions.create(
                model="tiny", messages=CHAT, max_tokens=30, seed=seed, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        async def plain(seed: int) -> str:
            reply = await client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=30, seed=seed)
            return reply.choices[0].message.content or ""

        streamed = await asyncio.gather(*(stream(seed) for seed in range(20)))
        assert streamed == await asyncio.gather(*(plain(seed) for seed in range(20)))


def test_cached_prompt_is_counted(client: openai.OpenAI) -> None:
    prompt = list(range(100, 200))
    counts = []
    for _ in range(2):
        usage = client.completions.create(model="tiny", prompt=prompt, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        counts.append(usage.prompt_tokens_details.cached_tokens)
    assert counts == [0, 96]


def test_bursts_change_neither_text_nor_usage_nor_log_probabilities(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": CHAT, "max_tokens": 60, "seed": 3, "logprobs": True, "stop": ["Zz"]}
    single = client.chat.completions.create(**options)
    with (
        running(ALL_TEXT | {"max_decode_steps": 8}) as bursting,
        openai.OpenAI(base_url=f"{bursting.url}/v1", api_key="none", max_retries=0) as other,
    ):
        plain = other.chat.completions.create(**options)
        chunks = list(other.chat.completions.create(stream=True, **options))
        num_steps = bursting.metric("iteration_tokens_total_count")
        assert bursting.metric("program_calls_total") < num_steps / 2
    assert plain.choices[0].message.content == single.choices[0].message.content
    assert plain.choices[0].logprobs == single.choices[0].logprobs
    assert plain.usage is not None
    assert single.usage is not None
    assert plain.usage.completion_tokens == single.usage.completion_tokens
    streamed = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in streamed) == single.choices[0].message.content
    scored = [entry for choice in streamed if choice.logprobs for entry in choice.logprobs.content or []]
    assert single.choices[0].logprobs is not None
    assert scored == single.choices[0].logprobs.content
