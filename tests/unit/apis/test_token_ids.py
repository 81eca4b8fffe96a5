"""`return_token_ids`: the ids of the prompt and of the text that was sent, the same in streams and plain replies."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientResponse

from jaxserve.frontend.choices.choice_stream import ChoiceStream, OutputDelta, OutputOptions
from jaxserve.frontend.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from jaxserve.frontend.parsers.output_format import OutputFormat
from jaxserve.ipc.messages import AddRequest, RequestOutput
from jaxserve.metrics import Metrics
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.tokenizer.tokenizer import Tokenizer
from jaxserve.types import RequestId
from tests.unit.apis.test_replies import CHAT, EOS, TEXT, both, events, ids, play, post_stream
from tests.unit.running_api import Api, running_api


def streamed_ids(chunks: list[dict[str, Any]], index: int = 0) -> list[int]:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [token_id for choice in choices for token_id in choice.get("token_ids", ())]


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize(
    ("stop", "is_included", "num_sent"),
    [("two", False, 4), ("two", True, 7), ("e tw", False, 2), ("one two", False, 0), ("zzz", False, 10)],
)
async def test_completion_has_the_ids_of_its_text(
    api: Api, stop: str, is_included: bool, num_sent: int, logprobs: int | None
) -> None:
    tokens = ids(api, "one two zz")
    prompt = ids(api, "cat")
    body = {
        "prompt": prompt,
        "max_tokens": 20,
        "stop": stop,
        "include_stop_str_in_output": is_included,
        "return_token_ids": True,
        "logprobs": logprobs,
    }
    plain, chunks = await both(api, TEXT, body, [tokens[:2], tokens[2:5], tokens[5:6], tokens[6:]])
    choice = plain["choices"][0]
    assert choice["prompt_token_ids"] == prompt
    assert choice["token_ids"] == tokens[:num_sent] == streamed_ids(chunks)
    assert choice["text"] == api.tokenizer.decode(choice["token_ids"])
    assert [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks] == [prompt, *[None] * (len(chunks) - 1)]
    text, sent = "", 0
    for one in (chunk["choices"][0] for chunk in chunks):
        text, sent = text + one["text"], sent + len(one["token_ids"])
        assert len(text) == sent, "a chunk has ids of text that it does not have"
        assert logprobs is None or len(one["logprobs"]["tokens"]) == len(one["token_ids"])
    assert logprobs is None or choice["logprobs"]["tokens"] == [
        api.tokenizer.token_text(i) for i in choice["token_ids"]
    ]


async def test_token_that_a_stop_string_divides_is_returned(api: Api) -> None:
    token = next(i for i in range(3, 400) if len(api.tokenizer.decode([i])) > 2 and api.tokenizer.decode([i]).isalpha())
    text = api.tokenizer.decode([token])
    for stop, expected in ((text[1:], [token]), (text, [])):
        body = {"prompt": "x", "max_tokens": 9, "stop": stop, "return_token_ids": True}
        plain, chunks = await both(api, TEXT, body, [[token], [token]])
        assert plain["choices"][0]["text"] == text.removesuffix(stop)
        assert plain["choices"][0]["token_ids"] == expected == streamed_ids(chunks)


async def test_parts_of_characters_and_the_token_that_ended_the_text_are_returned(
    api: Api, messages: list[Any]
) -> None:
    tokens = [*ids(api, "a€b"), EOS]
    body = {"messages": messages, "return_token_ids": True, "logprobs": True}
    steps = [tokens[:2], tokens[2:3], tokens[3:]]
    plain, chunks = await both(api, CHAT, body, steps, finish_reason="stop")
    choice = plain["choices"][0]
    assert choice["message"]["content"] == "a€b"
    assert choice["token_ids"] == tokens == streamed_ids(chunks)
    assert len(choice["logprobs"]["content"]) == len(tokens)
    assert plain["prompt_token_ids"] == chunks[0]["prompt_token_ids"]
    assert len(plain["prompt_token_ids"]) == plain["usage"]["prompt_tokens"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])


async def next_event(response: ClientResponse) -> dict[str, Any]:
    event = await asyncio.wait_for(response.content.readuntil(b"\n\n"), 60)
    return json.loads(event.removeprefix(b"data: "))


async def chunks_of(api: Api, path: str, body: dict[str, Any], groups: list[list[list[int]]]) -> list[dict[str, Any]]:
    """Return the choices of a stream: each group of outputs is sent once the chunk of the group before it was read."""
    chunks: list[dict[str, Any]] = []
    posted = asyncio.create_task(api.http.post(path, json=body | {"stream": True}))
    request = await api.engine.added()
    for group in groups:
        for step in group:
            api.engine.output(request, step, **({"finish_reason": "length"} if step is groups[-1][-1] else {}))
            await api.engine.is_heard()
        num_read = len(chunks)
        while len(chunks) == num_read:
            (choice,) = (await next_event(await posted))["choices"]
            if "role" not in choice.get("delta", ()):
                chunks.append(choice)
    async with await posted as response:
        assert await response.read() == b"data: [DONE]\n\n"
    return chunks


async def ids_of_each_step(api: Api, path: str, body: dict[str, Any], steps: list[list[int]]) -> list[list[int]]:
    """Return the ids of each chunk; there is one for each step, before the next step."""
    chunks = await chunks_of(api, path, body, [[step] for step in steps])
    if body.get("logprobs"):
        assert [len(chunk["logprobs"]["content"]) for chunk in chunks] == list(map(len, steps))
    return [chunk["token_ids"] for chunk in chunks]


@pytest.mark.parametrize("stop", [None, "two"])
async def test_ids_of_tokens_without_text_leave_at_once(api: Api, messages: list[Any], stop: str | None) -> None:
    steps = [[EOS], [EOS, EOS], ids(api, "ab"), [EOS], ids(api, "c")]
    body = {"messages": messages, "return_token_ids": True, "logprobs": True, "stop": stop}
    assert await ids_of_each_step(api, CHAT, body, steps) == steps
    body = {"prompt": "x", "max_tokens": 20, "return_token_ids": True, "stop": stop}
    assert await ids_of_each_step(api, TEXT, body, steps) == steps


async def test_ids_leave_while_a_parser_holds_their_text_back(tokenizer: Tokenizer, messages: list[Any]) -> None:
    form = OutputFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
    async with running_api(tokenizer, output_format=form) as api:
        steps = [[token] for token in ids(api, "<think>h€</think>y")]
        body = {"messages": messages, "return_token_ids": True}
        assert await ids_of_each_step(api, CHAT, body, steps) == steps


async def test_ids_inside_a_possible_stop_string_leave_with_its_text(api: Api) -> None:
    one, t, w, e = ([token] for token in ids(api, "1twe"))
    body = {"prompt": "x", "max_tokens": 20, "stop": "two", "return_token_ids": True}
    chunks = await chunks_of(api, TEXT, body, [[one], [t, [EOS], w, e]])
    assert [chunk["token_ids"] for chunk in chunks] == [one, [*t, EOS, *w, *e]]


async def test_stop_string_takes_the_tokens_inside_it_but_none_before_it(api: Api) -> None:
    steps = [[EOS], *([token] for token in ids(api, "a")), [EOS], [ids(api, "t")[0], EOS], ids(api, "wo")]
    body = {"prompt": "x", "max_tokens": 20, "stop": "two", "return_token_ids": True}
    plain, chunks = await both(api, TEXT, body, steps)
    assert plain["choices"][0]["text"] == "a"
    assert plain["choices"][0]["token_ids"] == [EOS, *ids(api, "a"), EOS] == streamed_ids(chunks)


async def test_stream_without_ids_has_no_chunk_without_text(api: Api, messages: list[Any]) -> None:
    euro = ids(api, "€")
    groups = [[[EOS], ids(api, "a")], [[EOS], euro[:2], euro[2:]], [[EOS, *ids(api, "b")]]]
    for path, body in ((TEXT, {"prompt": "x", "max_tokens": 9, "logprobs": 0}), (CHAT, {"messages": messages})):
        choices = await chunks_of(api, path, body, groups)
        texts = [choice["text"] if path == TEXT else choice["delta"]["content"] for choice in choices]
        assert texts == ["a", "€", "b"]


async def test_each_choice_has_the_ids_of_its_own_prompt(api: Api) -> None:
    prompts = [ids(api, "ab"), ids(api, "c")]
    body = {"prompt": prompts, "n": 2, "echo": True, "max_tokens": 2, "return_token_ids": True}
    texts = ["12", "34", "56", "78"]
    (_, reply), *_ = await asyncio.gather(api.post(TEXT, body), *[play(api, [ids(api, text)]) for text in texts])
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [p for p in prompts for _ in range(2)]
    assert [choice["token_ids"] for choice in reply["choices"]] == [ids(api, c["text"][-2:]) for c in reply["choices"]]
    stream = asyncio.create_task(post_stream(api, TEXT, body))
    await asyncio.gather(*[play(api, [ids(api, text)]) for text in texts])
    chunks = events(await stream)
    for index, choice in enumerate(reply["choices"]):
        assert streamed_ids(chunks, index) == choice["token_ids"]


async def test_reasoning_and_its_markers_are_among_the_ids(tokenizer: Tokenizer, messages: list[Any]) -> None:
    form = OutputFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
    async with running_api(tokenizer, output_format=form) as api:
        tokens = ids(api, "<think>hm</think>yes")
        body = {"messages": messages, "return_token_ids": True}
        steps = [[token] for token in tokens]
        plain, chunks = await both(api, CHAT, body, steps)
        assert plain["choices"][0]["message"]["content"] == "yes"
        assert plain["choices"][0]["token_ids"] == tokens == streamed_ids(chunks)
        status, reply = await api.post(CHAT, body | {"include_reasoning": False})
        assert (status, reply["error"]["param"]) == (400, "return_token_ids")


async def test_ids_are_absent_unless_requested(api: Api, messages: list[Any]) -> None:
    for path, prompt in ((TEXT, {"prompt": "x"}), (CHAT, {"messages": messages})):
        plain, chunks = await both(api, path, prompt | {"max_tokens": 3}, [ids(api, "abc")])
        assert not any("token_ids" in key for one in (plain, *chunks) for key in (*one, *one["choices"][0]))


@pytest.mark.parametrize("seed", range(40))
def test_ids_are_those_of_the_text_whatever_the_steps_are(tokenizer: Tokenizer, seed: int) -> None:
    draw = random.Random(seed)
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.max_token_id, 2, -1)}
    units = [[EOS], *([by_bytes[bytes([byte])] for byte in character.encode()] for character in "ab€")]
    tokens = [token for unit in draw.choices(units, k=12) for token in unit]
    options = OutputOptions(stop=draw.choice([("ab",), ("€a", "bb"), ("ba€",), ()]), returns_token_ids=True)

    def played(steps: list[list[int]]) -> tuple[list[int], OutputDelta]:
        """Return the ids of all deltas, and the last delta with the text of all."""
        choice = ChoiceStream(0, AddRequest(RequestId("r"), [5], EngineSamplingParams()), options, Metrics("tiny"))
        choice.open(tokenizer)
        deltas: list[OutputDelta] = []
        while not choice.is_finished:
            step, reason = steps.pop(0), None if steps else "length"
            delta = choice.push([RequestOutput(RequestId("r"), step, finish_reason=reason)])
            deltas += [] if delta is None else [delta]
        last = replace(deltas[-1], text="".join(delta.text for delta in deltas))
        return [token_id for delta in deltas for token_id in delta.token_ids], last

    cuts = sorted(draw.sample(range(1, len(tokens)), draw.randint(1, len(tokens) - 1)))
    found, end = played([tokens[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(tokens)], strict=True)])
    assert found == played([[token] for token in tokens])[0] == played([tokens])[0]
    expected = tokens
    if end.finish_reason == "stop":
        before = [len(tokenizer.decode(tokens[:i]).rstrip("\ufffd")) for i in range(len(tokens))]
        fits = [offset + (token != EOS) <= len(end.text) for offset, token in zip(before, tokens, strict=True)]
        expected = tokens[: fits.index(False)]
    assert found == expected
