"""Replies of a real model over HTTP: the official client and bare sockets against both processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jaxserve.tokenizer.tokenizer import load_tokenizer
from tests.e2e.http_server import Server
from tests.e2e.real_server import model
from tests.e2e.test_http_raw import open_post, read_until

pytestmark = [pytest.mark.slow, pytest.mark.versions, pytest.mark.optimized]

CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me – 海 🐚?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
SEEDED: dict[str, Any] = {"temperature": 1.1, "top_p": 0.95, "seed": 17, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(real_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def golden_prompt() -> list[int]:
    return [int(token) for token in model().prompt_ids]


def token_texts(token_ids: Any) -> list[str]:
    """Return the texts of these tokens in `logprobs`; no two tokens of the vocabulary have the same text."""
    tokenizer = load_tokenizer(model().path)
    every = [tokenizer.token_text(token_id) for token_id in range(tokenizer.vocab_size)]
    assert len(set(every)) == len(every)
    return [every[int(token_id)] for token_id in token_ids]


def complete(client: openai.OpenAI, **options: Any) -> Any:
    request: dict[str, Any] = {"model": "tiny", "prompt": golden_prompt(), "max_tokens": 40}
    return client.completions.create(**(request | options))


def ask(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**({"model": "tiny", "messages": CHAT, "max_tokens": 40} | options))


def test_greedy_tokens_equal_transformers(client: openai.OpenAI) -> None:
    choice = complete(client, max_tokens=64, logprobs=0, **GREEDY).choices[0]
    assert choice.logprobs.tokens == token_texts(model().output_ids)
    assert choice.finish_reason == "length"


def test_text_continues_the_prompt(client: openai.OpenAI, real_server: Server) -> None:
    """The prompt ends inside a character, which belongs to the text then."""
    text = complete(client, max_tokens=64, **GREEDY).choices[0].text
    whole = golden_prompt() + [int(token) for token in model().output_ids]
    shown, all_text = (
        json.loads(real_server.request("POST", "/detokenize", {"tokens": tokens})[2])["prompt"]
        for tokens in (golden_prompt()[:-1], whole)
    )
    assert shown + text == all_text


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("logprobs", [None, 0, 4])
def test_streamed_completion_equals_plain(
    client: openai.OpenAI, sampling: dict[str, Any], logprobs: int | None
) -> None:
    options = sampling | {"logprobs": logprobs}
    plain = complete(client, **options)
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}, **options))
    streamed = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in streamed) == plain.choices[0].text
    assert [choice.finish_reason for choice in streamed if choice.finish_reason] == ["length"]
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens == 40
    if logprobs is None:
        assert {choice.logprobs for choice in streamed} == {None}
        return
    whole = plain.choices[0].logprobs
    parts = [choice.logprobs for choice in streamed if choice.logprobs]
    assert [token for part in parts for token in part.tokens] == whole.tokens
    assert [place for part in parts for place in part.text_offset] == whole.text_offset
    # A prompt found in the cache is computed in other shapes, so the last bits differ.
    assert [value for part in parts for value in part.token_logprobs] == pytest.approx(whole.token_logprobs, abs=1e-4)
    if logprobs:
        assert [next(iter(top)) for part in parts for top in part.top_logprobs] == whole.tokens


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_streamed_chat_equals_plain(client: openai.OpenAI, sampling: dict[str, Any]) -> None:
    options = sampling | {"logprobs": True, "top_logprobs": 2}
    plain = ask(client, **options).choices[0]
    streamed = [choice for chunk in ask(client, stream=True, **options) for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in streamed) == plain.message.content
    found = [entry for choice in streamed if choice.logprobs for entry in choice.logprobs.content]
    assert [entry.token for entry in found] == [entry.token for entry in plain.logprobs.content]
    assert [entry.bytes for entry in found] == [entry.bytes for entry in plain.logprobs.content]
    raw = b"".join(bytes(entry.bytes) for entry in found)
    assert raw.decode("utf-8", "replace") == plain.message.content


def test_chat_is_its_template_completed(client: openai.OpenAI, real_server: Server) -> None:
    _, _, reply = real_server.request("POST", "/tokenize", {"messages": CHAT})
    tokens = json.loads(reply)["tokens"]
    assert token_texts(tokens)[:2] == ["<|im_start|>", "s"]
    assert ask(client, **GREEDY).choices[0].message.content == complete(client, prompt=tokens, **GREEDY).choices[0].text


@pytest.mark.parametrize("is_streamed", [False, True])
def test_stop_string_across_a_token_border(client: openai.OpenAI, is_streamed: bool) -> None:
    whole = complete(client, max_tokens=64, logprobs=0, **GREEDY).choices[0]
    tokens = whole.logprobs.tokens
    borders = [i for i in range(8, 63) if tokens[i].isascii() and len(tokens[i]) < 6 and len(tokens[i + 1]) < 6]
    assert borders
    for border in borders[:4]:
        stop = tokens[border][-1] + tokens[border + 1][0]
        expected = whole.text[: whole.text.index(stop)]
        found = complete(client, max_tokens=64, stop=["never this", stop], stream=is_streamed, **GREEDY)
        choices = [choice for chunk in found for choice in chunk.choices] if is_streamed else found.choices
        assert "".join(choice.text for choice in choices) == expected
        assert choices[-1].finish_reason == "stop"
        assert choices[-1].to_dict()["stop_reason"] == stop


def test_sampler_options_are_honoured(client: openai.OpenAI) -> None:
    """Show the effect of each option on a model that repeats itself."""

    def tokens(**options: Any) -> list[str]:
        extra = {"ignore_eos": True, **options.pop("extra_body", {})}
        return list(complete(client, temperature=0, logprobs=0, extra_body=extra, **options).choices[0].logprobs.tokens)

    tokenizer = load_tokenizer(model().path)
    plain = tokens()
    most = max(map(plain.count, plain))
    assert max(map(tokens(frequency_penalty=2).count, plain)) < most
    assert len(set(tokens(presence_penalty=2))) > len(set(plain))
    assert len(set(tokens(extra_body={"repetition_penalty": 2}))) > len(set(plain))
    first = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) == plain[0])
    assert tokens(logit_bias={str(first): -100})[0] != plain[0]
    (a,), (b,) = (tokenizer.encode(letter, False) for letter in "ab")
    allowed = {"allowed_token_ids": [a, b]}
    assert set(tokens(extra_body=allowed)) <= {"a", "b"}
    assert set(tokens(extra_body={**allowed, "bad_words": ["a"]})) == {"b"}
    assert set(tokens(extra_body={**allowed, "bad_words": ["b"]})) == {"a"}
    (end,) = tokenizer.encode("<|im_end|>", False)
    ended = complete(client, temperature=0, logit_bias={str(end): 100}, extra_body={"min_tokens": 7})
    assert (ended.usage.completion_tokens, ended.choices[0].finish_reason) == (8, "stop")


def test_end_token_ends_unless_ignored(client: openai.OpenAI) -> None:
    """The model has two: generation_config.json names <|im_end|> and <|im_start|>."""
    seeds = range(12)
    ended = [complete(client, max_tokens=200, temperature=2.0, seed=seed).choices[0] for seed in seeds]
    assert "stop" in {choice.finish_reason for choice in ended}
    kept = complete(client, max_tokens=200, temperature=2.0, seed=0, extra_body={"ignore_eos": True})
    assert kept.usage.completion_tokens == 200


def test_choices_differ_and_are_reproducible(client: openai.OpenAI) -> None:
    plain = complete(client, n=3, **SEEDED)
    texts = [choice.text for choice in plain.choices]
    assert len(set(texts)) == 3
    assert complete(client, **SEEDED).choices[0].text == texts[0]
    assert [choice.text for choice in complete(client, n=3, **SEEDED).choices] == texts
    assert plain.usage.completion_tokens == 120
    assert plain.usage.prompt_tokens == 40
    streamed = ["", "", ""]
    for chunk in complete(client, n=3, stream=True, **SEEDED):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_requests_without_a_seed_differ(client: openai.OpenAI) -> None:
    assert len({complete(client, temperature=1.5).choices[0].text for _ in range(4)}) == 4


async def test_same_seed_same_text_alone_and_among_sixteen_others(real_server: Server) -> None:
    url = f"{real_server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def one(number: int, **options: Any) -> str:
            reply: Any = await client.completions.create(
                model="tiny", prompt=[5 + number] * (3 + 11 * number), seed=number, **options
            )
            text: str = reply.choices[0].text
            return text

        async def streamed(number: int, **options: Any) -> str:
            chunks = await client.completions.create(
                model="tiny", prompt=[5 + number] * (3 + 11 * number), seed=number, stream=True, **options
            )
            return "".join([choice.text async for chunk in chunks for choice in chunk.choices])

        mix: list[dict[str, Any]] = [
            {"temperature": 1.0, "max_tokens": 60},
            {"temperature": 0, "max_tokens": 30, "logprobs": 5},
            {"temperature": 1.3, "top_p": 0.7, "max_tokens": 90},
            {"temperature": 0.9, "max_tokens": 1, "extra_body": {"top_k": 3}},
        ]
        alone = [await one(number, **mix[number % 4]) for number in range(17)]
        kinds = [streamed if number % 2 else one for number in range(17)]
        together = await asyncio.gather(*(kinds[number](number, **mix[number % 4]) for number in range(17)))
        assert together == alone
        assert len(set(alone)) >= 15


def test_repeated_prompt_is_found_in_the_cache(client: openai.OpenAI, real_server: Server) -> None:
    prompt = [(7 * i) % 300 + 3 for i in range(100)]
    hits = real_server.metric("prefix_cache_hits_total")
    first, second = (complete(client, prompt=prompt, **GREEDY) for _ in range(2))
    cached = [reply.usage.prompt_tokens_details.cached_tokens for reply in (first, second)]
    assert cached == [0, 96]
    assert first.choices[0].text == second.choices[0].text
    assert second.usage.to_dict() | {"prompt_tokens_details": None} == {
        "prompt_tokens": 100,
        "completion_tokens": 40,
        "total_tokens": 140,
        "prompt_tokens_details": None,
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    real_server.await_metric("prefix_cache_hits_total", hits + 96)


def test_many_choices_compute_their_prompt_once(client: openai.OpenAI, real_server: Server) -> None:
    computed = 'prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"'
    before = real_server.metric(computed)
    reply = complete(client, prompt=[9, 8, 7] * 33 + [6], n=128, max_tokens=2, temperature=1.0, seed=1)
    assert [choice.index for choice in reply.choices] == list(range(128))
    assert len({choice.text for choice in reply.choices}) > 32
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (100, 256)
    assert real_server.metric(computed) - before == 100 + 127 * 4, "all but the last, unfinished page are shared"


def test_echo_with_logprobs_scores_a_text_as_lm_eval_does(client: openai.OpenAI) -> None:
    reply = complete(client, logprobs=2, **GREEDY)
    generated = reply.choices[0].logprobs
    tokenizer = load_tokenizer(model().path)
    ids = {tokenizer.token_text(i): i for i in range(tokenizer.vocab_size)}
    whole = [*golden_prompt(), *(ids[token] for token in generated.tokens)]
    for max_tokens in (0, 1):
        scored = complete(client, prompt=whole, echo=True, logprobs=2, max_tokens=max_tokens, temperature=0)
        found = scored.choices[0].logprobs
        assert found.tokens[: len(whole)] == token_texts(whole)
        assert len(found.tokens) == len(whole) + max_tokens
        assert found.token_logprobs[0] is None
        assert found.token_logprobs[40:80] == pytest.approx(generated.token_logprobs, abs=1e-4)
        assert [next(iter(top)) for top in found.top_logprobs[40:80]] == generated.tokens
        assert scored.usage.completion_tokens == max_tokens


def test_prompt_logprobs_rank_the_prompts_tokens(client: openai.OpenAI) -> None:
    reply = ask(client, max_tokens=1, extra_body={"prompt_logprobs": 1}).to_dict()
    entries = reply["prompt_logprobs"]
    assert len(entries) == reply["usage"]["prompt_tokens"]
    assert entries[0] is None
    for entry in entries[1:]:
        own, *others = entry.values()
        assert own["rank"] == 1 or (own["rank"] > 1 and others[0]["rank"] == 1)
        assert all(other["logprob"] >= own["logprob"] for other in others)


def test_echo_puts_the_prompt_before_the_text(client: openai.OpenAI) -> None:
    plain = complete(client, prompt="She sells – 海", **GREEDY)
    echoed = complete(client, prompt="She sells – 海", echo=True, **GREEDY)
    assert echoed.choices[0].text == "She sells – 海" + plain.choices[0].text
    assert echoed.usage.completion_tokens == plain.usage.completion_tokens
    streamed = complete(client, prompt="She sells – 海", echo=True, stream=True, **GREEDY)
    assert "".join(choice.text for chunk in streamed for choice in chunk.choices) == echoed.choices[0].text
    only = complete(client, prompt=["one", "two"], echo=True, max_tokens=0)
    assert [choice.text for choice in only.choices] == ["one", "two"]


def test_list_of_prompts_equals_single_prompts(client: openai.OpenAI) -> None:
    texts = ["She sells", "sea shells", "by the sea"]
    for prompts in (texts, [[9, 8, 7], [5] * 50, golden_prompt()]):
        batch = complete(client, prompt=prompts, n=2, **SEEDED)
        assert [choice.index for choice in batch.choices] == list(range(6))
        single = [complete(client, prompt=prompt, n=2, **SEEDED).choices for prompt in prompts]
        assert [choice.text for choice in batch.choices] == [choice.text for pair in single for choice in pair]


def test_mistakes_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        complete(client, model="other")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        complete(client, prompt=[5] * 512)
    assert too_long.value.code == "context_length_exceeded"
    assert "512" in too_long.value.message
    with pytest.raises(openai.BadRequestError) as unknown_token:
        complete(client, prompt=[320])
    assert "320" in unknown_token.value.message
    assert client.models.retrieve("tiny").to_dict()["max_model_len"] == 512


def test_longest_request_fits_exactly(client: openai.OpenAI) -> None:
    reply = complete(client, prompt=[5] * 500, max_tokens=12, **GREEDY)
    assert reply.usage.total_tokens == 512
    with pytest.raises(openai.BadRequestError):
        complete(client, prompt=[5] * 500, max_tokens=13, **GREEDY)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_numbers_that_json_does_not_know_are_refused(real_server: Server, name: str, number: str) -> None:
    body = f'{{"prompt": "x", "{name}": {number}}}'.encode()
    status, _, reply = real_server.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    assert status == 400
    assert json.loads(reply)["error"]["type"] == "invalid_request_error"


def test_bare_socket_sees_a_well_formed_event_stream(client: openai.OpenAI, real_server: Server) -> None:
    body = {"prompt": golden_prompt(), "max_tokens": 472, "temperature": 0, "ignore_eos": True, "stream": True}
    with open_post(real_server, body) as connection:
        head, _, rest = read_until(connection, b"\r\n0\r\n\r\n").partition(b"\r\n\r\n")
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_until(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 200 "), "the connection is kept"
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"text/event-stream" in head.lower()
    events = b"".join(chunks(rest)).split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    texts = [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events[:-2]]
    assert len(texts) > 1, "nothing was sent before the end"
    assert "".join(texts) == complete(client, max_tokens=472, **GREEDY).choices[0].text


def chunks(data: bytes) -> Iterator[bytes]:
    """The payloads of a chunked transfer."""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        yield data[:length]
        assert data[length : length + 2] == b"\r\n"
        data = data[length + 2 :]


def test_anthropics_messages_are_the_same_replies(client: openai.OpenAI, real_server: Server) -> None:
    chat = ask(client, **GREEDY)
    options = {"model": "tiny", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    body = options | {"system": CHAT[0]["content"], "messages": CHAT[1:]}
    status, _, raw = real_server.request("POST", "/v1/messages", body)
    reply = json.loads(raw)
    assert (status, [block["text"] for block in reply["content"]]) == (200, [chat.choices[0].message.content])
    assert (reply["stop_reason"], reply["usage"]["output_tokens"]) == ("max_tokens", 40)
    _, _, raw = real_server.request("POST", "/v1/messages/count_tokens", {"messages": CHAT[1:], "system": "Be brief."})
    assert json.loads(raw) == {"input_tokens": chat.usage.prompt_tokens}
    _, _, raw = real_server.request("POST", "/v1/messages", body | {"stream": True})
    events = [json.loads(part.partition("data: ")[2]) for part in raw.decode().split("\n\n")[:-1]]
    text = "".join(event["delta"]["text"] for event in events if "text" in event.get("delta", {}))
    assert text == reply["content"][0]["text"]
