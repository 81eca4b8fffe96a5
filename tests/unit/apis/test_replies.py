"""Bytes of replies and streams: text, stop strings, log-probabilities, usage, errors."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from jaxserve.ipc.messages import AddRequest, RequestOutput, StepOutputs, TokenLogprobs
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.unit.running_api import MAX_MODEL_LEN, TOKENIZERS, Api, running_api

EOS = 2
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
NO_DRAFTS = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


def ids(api: Api, text: str) -> list[int]:
    """One token per byte, so that every border is a token border."""
    by_bytes = {api.tokenizer.token_bytes(i): i for i in range(api.tokenizer.max_token_id, 2, -1)}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


async def post_stream(api: Api, path: str, body: dict[str, Any]) -> bytes:
    async with api.http.post(path, json=body | {"stream": True}) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        return await response.read()


def events(raw: bytes) -> list[dict[str, Any]]:
    assert raw.endswith(b"\n\ndata: [DONE]\n\n")
    parts = raw.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")[:-1]
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


async def play(api: Api, steps: list[list[int]], finish_reason: str | None = "length", **fields: Any) -> AddRequest:
    """Be the engine for one request: one output per step, the last one with the finish reason."""
    request = await api.engine.added()
    for i, token_ids in enumerate(steps):
        is_last = i == len(steps) - 1
        api.engine.output(request, token_ids, **(fields | {"finish_reason": finish_reason} if is_last else {}))
    return request


async def both(api: Api, path: str, body: dict[str, Any], steps: list[list[int]], **fields: Any) -> tuple[Any, Any]:
    """The plain reply and the events of the stream for the same engine outputs."""
    plain, _ = await asyncio.gather(api.post(path, body), play(api, steps, **fields))
    raw, _ = await asyncio.gather(post_stream(api, path, body), play(api, steps, **fields))
    assert plain[0] == 200
    return plain[1], events(raw)


def streamed_text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


async def test_chat_reply_and_stream_byte_for_byte(api: Api, messages: list[Any]) -> None:
    steps = [ids(api, "He"), ids(api, "y"), [EOS]]
    plain, chunks = await both(api, CHAT, {"messages": messages}, steps, finish_reason="stop")
    reply_id, created = plain.pop("id"), plain.pop("created")
    assert reply_id.startswith("chatcmpl-")
    assert isinstance(created, int)
    num_prompt = plain["usage"]["prompt_tokens"]
    assert plain == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hey", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": 4,
            "total_tokens": num_prompt + 4,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0} | NO_DRAFTS,
        },
        "system_fingerprint": "jaxserve-0.1.0-0123abcd",
        "service_tier": None,
    }
    assert {(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "chat.completion.chunk")
    }
    assert all(chunk["system_fingerprint"] == "jaxserve-0.1.0-0123abcd" for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks)
    first, *_, last = (chunk["choices"][0] for chunk in chunks)
    assert first == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", None)
    assert streamed_text(chunks) == "Hey"


async def test_stream_frames_are_exact(api: Api) -> None:
    raw, _ = await asyncio.gather(
        post_stream(api, TEXT, {"prompt": "x"}), play(api, [ids(api, "a\n")], finish_reason="length")
    )
    head, tail = raw.split(b'"created":', 1)
    assert head.startswith(b'data: {"id":"cmpl-')
    assert head.endswith(b'","object":"text_completion",')
    assert tail.split(b",", 1)[1] == (
        b'"model":"tiny","choices":[{"index":0,"text":"a\\n","logprobs":null,"finish_reason":"length",'
        b'"stop_reason":null}],"system_fingerprint":"jaxserve-0.1.0-0123abcd"}\n\ndata: [DONE]\n\n'
    )


@pytest.mark.parametrize("cut", [[1] * 11, [11], [4, 7], [5, 6], [6, 5], [3, 1, 7]])
@pytest.mark.parametrize("is_included", [False, True])
async def test_stop_string_matches_across_any_token_and_step_border(
    api: Api, cut: list[int], is_included: bool
) -> None:
    tokens = ids(api, "one two end")
    starts = [sum(cut[:i]) for i in range(len(cut))]
    steps = [tokens[start : start + size] for start, size in zip(starts, cut, strict=True)]
    body = {"prompt": "x", "max_tokens": 20, "stop": ["zzz", "two"], "include_stop_str_in_output": is_included}
    plain, chunks = await both(api, TEXT, body, steps)
    choice = plain["choices"][0]
    assert choice["text"] == streamed_text(chunks) == ("one two" if is_included else "one ")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "two")
    assert chunks[-1]["choices"][0]["stop_reason"] == "two"
    assert plain["usage"]["completion_tokens"] == 7


async def test_prompt_tokens_are_counted_by_source(api: Api) -> None:
    reply = asyncio.create_task(api.post(TEXT, {"prompt": [5, 6, 7, 8]}))
    request = await api.engine.added()
    api.engine.output(request, ids(api, "a"), num_cached_tokens=3, finish_reason="length")
    assert (await reply)[0] == 200
    sources = ("local_compute", "local_cache_hit")
    assert [api.metrics.value("prompt_tokens_by_source", source=source) for source in sources] == [1, 3]


async def test_time_of_a_request_is_measured_in_parts(api: Api) -> None:
    reply = asyncio.create_task(api.post(TEXT, {"prompt": "x"}))
    request = await api.engine.added()
    api.engine.output(request, ids(api, "a"), queue_seconds=0.25)
    await api.engine.is_heard()
    api.engine.output(request, ids(api, "b"), queue_seconds=0.25, num_preemptions=3, finish_reason="length")
    assert (await reply)[0] == 200
    total = {
        part: api.metrics.registry.get_sample_value(
            f"jaxserve:request_{part}_sum", {"model_name": "tiny", "engine": "0"}
        )
        for part in ("queue_time_seconds", "prefill_time_seconds", "decode_time_seconds", "inference_time_seconds")
    }
    assert total["queue_time_seconds"] == 0.25
    assert total["inference_time_seconds"] == total["prefill_time_seconds"] + total["decode_time_seconds"]  # type: ignore[operator]
    names = [*total, "num_preemptions"]
    assert [api.metrics.value(f"request_{name}") for name in names] == [1] * 5


async def test_stop_string_aborts_the_request_in_the_engine(api: Api) -> None:
    reply = asyncio.create_task(api.post(TEXT, {"prompt": "x", "stop": "b"}))
    request = await api.engine.added()
    api.engine.output(request, ids(api, "abc"))
    assert await api.engine.was_aborted() == request.request_id
    status, body = await reply
    assert (status, body["choices"][0]["text"]) == (200, "a")
    assert api.metrics.value("request_success", finished_reason="stop") == 1


async def test_text_held_back_for_a_stop_string_comes_at_the_end(api: Api) -> None:
    steps = [ids(api, "a <"), ids(api, "|e")]
    plain, chunks = await both(api, TEXT, {"prompt": "x", "stop": "<|end|>"}, steps)
    assert plain["choices"][0]["text"] == streamed_text(chunks) == "a <|e"


async def test_no_empty_chunks_while_text_is_held_back(api: Api) -> None:
    steps = [[token] for token in ids(api, "a<|enb")]
    _, chunks = await both(api, TEXT, {"prompt": "x", "stop": "<|end|>"}, steps)
    assert all(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.mark.parametrize(
    ("steps", "text"),
    [([[0xE2], [0x82, 0xAC]], "€"), ([[0xF0, 0x9F], [0x8E]], "\ufffd"), ([[0x61], [0xFF], [0x62]], "a\ufffdb")],
)
async def test_characters_are_never_split(api: Api, steps: list[list[int]], text: str) -> None:
    by_bytes = {api.tokenizer.token_bytes(i): i for i in range(api.tokenizer.max_token_id, 2, -1)}
    tokens = [[by_bytes[bytes([byte])] for byte in step] for step in steps]
    plain, chunks = await both(api, TEXT, {"prompt": "x"}, tokens)
    assert plain["choices"][0]["text"] == streamed_text(chunks) == text


@pytest.mark.parametrize("is_included", [False, True])
async def test_stop_token_shows_only_when_asked(api: Api, is_included: bool) -> None:
    tokens = ids(api, "ab")
    body = {"prompt": "x", "stop_token_ids": [tokens[1]], "include_stop_str_in_output": is_included}
    plain, chunks = await both(api, TEXT, body, [tokens], finish_reason="stop", stop_token_id=tokens[1])
    choice = plain["choices"][0]
    assert choice["text"] == streamed_text(chunks) == ("ab" if is_included else "a")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", tokens[1])
    assert plain["usage"]["completion_tokens"] == 2


async def test_chat_logprobs_have_exact_bytes(api: Api, messages: list[Any]) -> None:
    body = {"messages": messages, "logprobs": True, "top_logprobs": 2}
    tokens = ids(api, "é")
    plain, chunks = await both(api, CHAT, body, [[tokens[0]], [tokens[1]]])
    content = plain["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in content] == [("bytes:\\xc3", [0xC3]), ("bytes:\\xa9", [0xA9])]
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2]
    assert content[0]["top_logprobs"][0] == {"token": "bytes:\\xc3", "logprob": -1.0, "bytes": [0xC3]}
    streamed = [e for chunk in chunks for c in chunk["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
    assert streamed == content


async def test_minus_infinity_is_clamped(api: Api, messages: list[Any]) -> None:
    body = {"messages": messages, "logprobs": True, "top_logprobs": 1}
    scores = [TokenLogprobs(-math.inf, [5], [-math.inf])]
    plain, _ = await both(api, CHAT, body, [ids(api, "a")], logprobs=scores)
    entry = plain["choices"][0]["logprobs"]["content"][0]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)


async def test_completion_logprobs_and_offsets(api: Api) -> None:
    plain, chunks = await both(api, TEXT, {"prompt": "x", "logprobs": 1}, [ids(api, "aé"), ids(api, "b")])
    logprobs = plain["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["token_logprobs"] == [-1.0] * 4
    assert logprobs["top_logprobs"][0] == {"a": -1.0}
    for name, values in logprobs.items():
        assert [v for chunk in chunks for v in chunk["choices"][0]["logprobs"][name]] == values


async def test_zero_logprobs_are_of_the_chosen_token_only(api: Api) -> None:
    plain, _ = await both(api, TEXT, {"prompt": "x", "logprobs": 0}, [ids(api, "a")])
    assert plain["choices"][0]["logprobs"]["top_logprobs"] is None
    assert plain["choices"][0]["logprobs"]["token_logprobs"] == [-1.0]


async def test_usage_chunk_and_null_usage_before_it(api: Api, messages: list[Any]) -> None:
    body = {"messages": messages, "stream_options": {"include_usage": True}}
    raw, _ = await asyncio.gather(post_stream(api, CHAT, body), play(api, [ids(api, "ab")], num_cached_tokens=3))
    *others, last = events(raw)
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_continuous_usage_counts_up(api: Api) -> None:
    body = {"prompt": "x", "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    raw, _ = await asyncio.gather(post_stream(api, TEXT, body), play(api, [ids(api, "ab")]))
    counts = [chunk["usage"]["completion_tokens"] for chunk in events(raw)]
    assert counts == sorted(counts)
    assert counts[-1] == 2


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_bad_words_reach_the_engine_as_their_token_ids(api: Api, path: str, messages: list[Any]) -> None:
    body = {"messages": messages} if path == CHAT else {"prompt": "x"}
    (status, _), request = await asyncio.gather(
        api.post(path, body | {"bad_words": ["Hey", " you", "Hey"], "logit_bias": {"7": 2}}), play(api, [ids(api, "a")])
    )
    tokenizer = api.tokenizer
    spelled = [tuple(tokenizer.encode(text, False)) for text in ("Hey", " Hey", "you", " you")]
    assert status == 200
    assert request.sampling.bad_words == list(dict.fromkeys(spelled))
    assert request.sampling.logit_bias == {7: 2.0}


async def test_stop_string_waits_for_min_tokens(api: Api) -> None:
    body = {"prompt": "x", "stop": "ab", "min_tokens": 3, "max_tokens": 9}
    (_, plain), _ = await asyncio.gather(api.post(TEXT, body), play(api, [ids(api, "ababxab"), ids(api, "c")]))
    assert plain["choices"][0]["text"] == "ababx"
    assert plain["choices"][0]["stop_reason"] == "ab"


async def test_choices_of_n_interleave_by_index(api: Api) -> None:
    body = {"prompt": ["x", "y"], "n": 2, "seed": 7, "temperature": 1}
    reply = asyncio.create_task(post_stream(api, TEXT, body))
    requests = [await api.engine.added() for _ in range(4)]
    seeds = [request.sampling.seed for request in requests]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] == 7 != seeds[1]
    for request, letter in zip(reversed(requests), "dcba", strict=True):
        api.engine.output(request, ids(api, letter), finish_reason="length")
    chunks = events(await reply)
    assert [streamed_text(chunks, index) for index in range(4)] == ["a", "b", "c", "d"]


async def test_requests_without_seed_differ_reproducibly(tokenizer: Tokenizer) -> None:
    async def seeds() -> list[int]:
        async with running_api(tokenizer) as api:
            tasks = []
            found = []
            for _ in range(3):
                tasks.append(asyncio.create_task(api.post(TEXT, {"prompt": "x"})))
                request = await api.engine.added()
                found.append(request.sampling.seed)
                api.engine.output(request, [5], finish_reason="length")
            await asyncio.gather(*tasks)
            return found

    first = await seeds()
    assert len(set(first)) == 3
    assert await seeds() == first


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_echo_puts_the_prompt_first(api: Api, is_streamed: bool) -> None:
    body = {"prompt": ids(api, "ab"), "echo": True}
    plain, chunks = await both(api, TEXT, body, [ids(api, "c")])
    assert plain["choices"][0]["text"] == streamed_text(chunks) == "abc"


async def test_echo_without_tokens_needs_no_engine(api: Api) -> None:
    body = {"prompt": ["ab", "c"], "echo": True, "max_tokens": 0}
    status, plain = await api.post(TEXT, body)
    assert status == 200
    assert [(c["index"], c["text"], c["finish_reason"]) for c in plain["choices"]] == [
        (0, "ab", "length"),
        (1, "c", "length"),
    ]
    chunks = events(await post_stream(api, TEXT, body))
    assert [streamed_text(chunks, index) for index in range(2)] == ["ab", "c"]


async def test_listed_tokens_take_the_place_of_the_most_likely(api: Api, messages: list[Any]) -> None:
    listed = {"logprob_token_ids": [7, 8]}
    chat, request = await asyncio.gather(
        api.post(CHAT, {"messages": messages, "logprobs": True, **listed}), play(api, [ids(api, "a")])
    )
    assert (request.sampling.logprob_token_ids, request.sampling.num_top_logprobs) == ([7, 8], 2)
    assert len(chat[1]["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    text, request = await asyncio.gather(
        api.post(TEXT, {"prompt": "x", "logprobs": 5, **listed}), play(api, [ids(api, "a")])
    )
    assert request.sampling.num_top_logprobs == 2
    assert len(text[1]["choices"][0]["logprobs"]["top_logprobs"][0]) == 2


async def check_echo(api: Api, prompt: str | list[int], added: int, generated: list[int], **fields: Any) -> str:
    """The text of a reply in which every shown token begins at its offset, plain and streamed.

    added: tokens at the beginning of the prompt that the tokenizer added.
    """
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": len(generated), **fields}
    plain, chunks = await both(api, TEXT, body, [generated])
    text, logprobs = plain["choices"][0]["text"], plain["choices"][0]["logprobs"]
    assert text == streamed_text(chunks)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [offset for part in parts for offset in part["text_offset"]] == logprobs["text_offset"]
    assert logprobs["text_offset"][:added] == [0] * added
    for token, offset in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[added:]:
        is_hidden = token.startswith("<") and token not in text
        assert is_hidden or text[offset:].startswith(token.strip(" ") if offset == 0 else token), (token, offset)
    return str(text)


@pytest.mark.parametrize("skips", [True, False])
async def test_offsets_count_the_control_tokens_of_an_echoed_text(api: Api, skips: bool) -> None:
    prompt = "<|im_start|>user\nHi<|im_end|>\n"
    text = await check_echo(api, prompt, 0, [*ids(api, "a"), 0, *ids(api, "b")], skip_special_tokens=skips)
    assert text == prompt + ("ab" if skips else "a<|endoftext|>b")


@pytest.mark.parametrize("skips", [True, False])
async def test_offsets_count_the_control_tokens_of_echoed_ids_as_the_text_does(api: Api, skips: bool) -> None:
    prompt = [1, *ids(api, "cat"), 2]
    text = await check_echo(api, prompt, 0, ids(api, "s!"), skip_special_tokens=skips)
    assert text == ("cats!" if skips else "<|im_start|>cat<|im_end|>s!")


async def test_offsets_follow_an_echo_that_ends_inside_a_character(api: Api) -> None:
    first, second = ids(api, "\u00e9")
    body = {"prompt": [first], "echo": True, "logprobs": 0}
    plain, _ = await both(api, TEXT, body, [[second, *ids(api, "ab")]])
    assert plain["choices"][0]["text"] == "\ufffd\u00e9ab"
    assert plain["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3]


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("adds", [True, False])
async def test_an_added_begin_token_has_no_text_in_an_echo(skips: bool, adds: bool) -> None:
    async with running_api(load_tokenizer(TOKENIZERS / "sentencepiece")) as api:
        [bos] = api.tokenizer.encode("")
        generated = api.tokenizer.encode("the dog", add_special_tokens=False)
        fields = {"skip_special_tokens": skips, "add_special_tokens": adds}
        text = await check_echo(api, "Hello dog", int(adds), [*generated, bos, *generated], **fields)
    assert text == "Hello dog the dog" + (" the dog" if skips else api.tokenizer.token_text(bos) + " the dog")


@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_echo_with_logprobs_scores_the_prompt(api: Api, max_tokens: int) -> None:
    """The request of lm-eval; a stream adds up to the same reply."""
    body = {"prompt": ids(api, "cat"), "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    plain, chunks = await both(api, TEXT, body, [ids(api, "s!")[: max(1, max_tokens)]])
    (choice,) = plain["choices"]
    extra = "s!"[:max_tokens]
    assert choice["text"] == streamed_text(chunks) == "cat" + extra
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"] == [None, -0.5, -1.0, *[-1.0 for _ in extra]]
    assert logprobs["text_offset"] == list(range(3 + max_tokens))
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"a": -0.5, api.tokenizer.token_text(0): -1.0}
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert {key: [value for part in parts for value in part[key]] for key in logprobs} == logprobs
    assert plain["usage"]["completion_tokens"] == max_tokens


@pytest.mark.parametrize("as_text", [False, True])
async def test_a_prompt_that_fills_the_context_is_echoed_and_scored(api: Api, as_text: bool) -> None:
    text = "!" * MAX_MODEL_LEN
    body = {"prompt": text if as_text else ids(api, text), "echo": True, "max_tokens": 0}
    status, plain = await api.post(TEXT, body)
    assert (status, plain["choices"][0]["text"]) == (200, text)
    scored, request = await asyncio.gather(api.post(TEXT, body | {"logprobs": 1}), play(api, [ids(api, "x")]))
    assert scored[0] == 200
    assert len(scored[1]["choices"][0]["logprobs"]["token_logprobs"]) == MAX_MODEL_LEN
    assert (len(request.prompt_token_ids), request.sampling.max_tokens) == (MAX_MODEL_LEN, 1)
    assert scored[1]["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "reason"),
    [
        (MAX_MODEL_LEN, 1, "contains 64 input tokens, which leaves no room for output"),
        (MAX_MODEL_LEN - 1, 2, "you requested 65 tokens"),
        (MAX_MODEL_LEN + 1, 0, "contains 65 input tokens, which is more"),
    ],
)
async def test_a_token_beyond_the_context_is_refused(api: Api, num_tokens: int, max_tokens: int, reason: str) -> None:
    for prompt in ([5] * num_tokens, "!" * num_tokens):
        body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": max_tokens}
        status, reply = await api.post(TEXT, body)
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
        assert reason in reply["error"]["message"].replace("more than 64", "65").replace("at least 65", "65")


async def test_the_last_tokens_of_the_context_are_generated_and_scored(api: Api) -> None:
    body = {"prompt": [5] * (MAX_MODEL_LEN - 1), "prompt_logprobs": 0, "max_tokens": 1}
    (status, reply), _ = await asyncio.gather(api.post(TEXT, body), play(api, [ids(api, "x")]))
    assert (status, len(reply["choices"][0]["prompt_logprobs"])) == (200, MAX_MODEL_LEN - 1)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_prompt_logprobs_are_spelled_as_vllm_does(api: Api, path: str, messages: list[Any]) -> None:
    body: dict[str, Any] = {"messages": messages} if path == CHAT else {"prompt": ids(api, "cat")}
    (_, reply), request = await asyncio.gather(
        api.post(path, body | {"prompt_logprobs": 1, "max_tokens": 1}), play(api, [ids(api, "s")])
    )
    entries = reply["prompt_logprobs"] if path == CHAT else reply["choices"][0]["prompt_logprobs"]
    prompt = request.prompt_token_ids
    assert len(entries) == len(prompt)
    assert entries[0] is None
    assert entries[1] == {
        str(prompt[1]): {"logprob": -0.5, "rank": 8, "decoded_token": api.tokenizer.token_text(prompt[1])},
        "0": {"logprob": -1.0, "rank": 1, "decoded_token": api.tokenizer.token_text(0)},
    }


async def test_scores_of_a_prompt_that_come_again_count(api: Api) -> None:
    """After an update of the weights the engine sends all of them once more."""
    asking = asyncio.create_task(api.post(TEXT, {"prompt": [5, 6, 7], "prompt_logprobs": 0, "max_tokens": 1}))
    request = await api.engine.added()
    api.engine.output(request, [], prompt_logprobs=[TokenLogprobs(-9.0, [], [], 1)])
    await api.engine.is_heard()
    api.engine.output(request, ids(api, "s"), finish_reason="length")
    _, reply = await asking
    entries = reply["choices"][0]["prompt_logprobs"]
    assert [[entry["logprob"] for entry in each.values()] for each in entries[1:]] == [[-0.5], [-1.0]]


async def test_default_output_lengths(api: Api, messages: list[Any]) -> None:
    for path, body, expected in (
        (TEXT, {"prompt": [5] * 4}, 16),
        (TEXT, {"prompt": [5] * 60}, 4),
        (CHAT, {"messages": messages}, None),
        (CHAT, {"messages": messages, "max_tokens": 3, "max_completion_tokens": 5}, 5),
    ):
        _, request = await asyncio.gather(api.post(path, body), play(api, [[5]]))
        room = 64 - len(request.prompt_token_ids)
        assert request.sampling.max_tokens == (room if expected is None else expected)


async def test_refusal_before_the_first_token_keeps_its_status(api: Api) -> None:
    reply = asyncio.create_task(api.post(TEXT, {"prompt": "x", "stream": True}))
    api.engine.refuse(await api.engine.added(), "ContextLengthError", "too long for the cache", param="prompt")
    status, body = await reply
    assert status == 400
    assert body["error"] == {
        "message": "too long for the cache",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "context_length_exceeded",
    }


async def test_failure_in_midstream_is_an_error_event_then_done(api: Api) -> None:
    opening = asyncio.create_task(api.http.post(TEXT, json={"prompt": "x", "stream": True, "n": 2}))
    requests = [await api.engine.added() for _ in range(2)]
    api.engine.output(requests[0], ids(api, "a"))
    async with await opening as response:
        assert b'"text":"a"' in await response.content.readuntil(b"\n\n")
        api.engine.refuse(requests[0], "InternalError", "it broke")
        rest = await response.content.read()
    assert rest == (
        b'data: {"error":{"message":"it broke","type":"server_error","param":null,"code":"internal_error"}}\n\n'
        b"data: [DONE]\n\n"
    )
    assert await api.engine.was_aborted() == requests[1].request_id
    assert api.client.admission.num_sequences == 0


async def test_idle_stream_gets_keep_alive_comments(tokenizer: Tokenizer) -> None:
    async with (
        running_api(tokenizer, keep_alive_s=0.02) as api,
        api.http.post(TEXT, json={"prompt": "x", "stream": True}) as response,
    ):
        request = await api.engine.added()
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        api.engine.output(request, ids(api, "a"), finish_reason="length")
        rest = await response.content.read()
    assert b'"text":"a"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_outputs_that_gathered_come_as_one_chunk(api: Api) -> None:
    reply = asyncio.create_task(post_stream(api, TEXT, {"prompt": "x"}))
    request = await api.engine.added()
    api.engine.say(
        StepOutputs(
            [
                RequestOutput(request.request_id, ids(api, "a")),
                RequestOutput(request.request_id, ids(api, "b"), finish_reason="length"),
            ]
        )
    )
    (chunk,) = events(await reply)
    assert chunk["choices"][0]["text"] == "ab"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_client_that_leaves_ends_its_request(api: Api, is_streamed: bool) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    body = json.dumps({"prompt": "x", "n": 2, "stream": is_streamed}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    requests = [await api.engine.added() for _ in range(2)]
    if is_streamed:
        api.engine.output(requests[0], ids(api, "a"))
        await reader.readuntil(b'"text":"a"')
    writer.close()
    await writer.wait_closed()
    assert {await api.engine.was_aborted() for _ in range(2)} == {request.request_id for request in requests}
    await api.client.admission.wait_idle()
    assert api.metrics.value("client_disconnects") == 1
    assert api.metrics.value("request_success", finished_reason="abort") == 2


async def test_tokenize_and_detokenize_round_trip(api: Api) -> None:
    text = "She sells – 海 🐚"
    status, reply = await api.post("/tokenize", {"prompt": text, "return_token_strs": True})
    assert status == 200
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert reply["max_model_len"] == 64
    assert await api.post("/detokenize", {"tokens": reply["tokens"]}) == (200, {"prompt": text})


async def test_tokenizer_info_names_special_tokens_and_template(api: Api, tokenizer: Tokenizer) -> None:
    async with api.http.get("/tokenizer_info") as response:
        info = await response.json()
    declared = json.loads((TOKENIZERS / "byte_level" / "tokenizer_config.json").read_text())
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
    assert info == {name: declared[name] for name in names} | {"model_max_length": 64}


async def test_tokenize_of_messages_is_what_chat_sends(api: Api, messages: list[Any]) -> None:
    _, reply = await api.post("/tokenize", {"messages": messages})
    _, request = await asyncio.gather(api.post(CHAT, {"messages": messages}), play(api, [[5]]))
    assert request.prompt_token_ids == reply["tokens"]


async def test_models_are_listed_and_shown(api: Api) -> None:
    async with api.http.get("/v1/models") as response:
        listed = await response.json()
    assert [card["id"] for card in listed["data"]] == ["tiny", "alias"]
    assert listed["object"] == "list"
    async with api.http.get("/v1/models/alias") as response:
        card = await response.json()
    assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == ("alias", "model", "jaxserve", 64)


@pytest.mark.parametrize("content", ["Hey you", [{"type": "text", "text": "Hey "}, {"type": "text", "text": "you"}]])
async def test_a_prediction_reaches_the_engine_and_its_worth_the_usage(
    api: Api, messages: list[Any], content: Any
) -> None:
    body = {"messages": messages, "prediction": {"type": "content", "content": content}}
    drafted = {"num_accepted_tokens": 5, "num_rejected_tokens": 2}
    reply, request = await asyncio.gather(api.post(CHAT, body), play(api, [ids(api, "Hey You")], **drafted))
    assert api.tokenizer.decode(request.prediction_token_ids, False) == "Hey you"
    assert reply[1]["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 2,
    }


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "text": "a"}]}, "prediction.content[0].type"),
    ],
)
async def test_a_prediction_that_is_none_is_refused(
    api: Api, messages: list[Any], prediction: dict[str, Any], param: str
) -> None:
    status, reply = await api.post(CHAT, {"messages": messages, "prediction": prediction})
    assert status == 400
    assert reply["error"]["param"] == param
