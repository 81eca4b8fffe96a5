"""Log-probabilities of replies are reserved before a request reaches the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from jaxserve.frontend.reply_budget import BYTES_PER_SCORE
from jaxserve.ipc.messages import RequestOutput, StepOutputs
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.running_api import Api, running_api

PATH = "/v1/completions"
NUM_SCORES = 100


def body(max_tokens: int, logprobs: int | None, **fields: Any) -> dict[str, Any]:
    return {"prompt": [5, 6, 7], "max_tokens": max_tokens, "logprobs": logprobs} | fields


def end_of(api: Api, request: Any) -> None:
    api.engine.output(request, [35] * request.sampling.max_tokens, finish_reason="length")


async def test_reply_that_does_not_fit_alone_is_413_and_names_the_flag(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, max_reply_memory=NUM_SCORES * BYTES_PER_SCORE) as api:
        for fields, count in (
            (body(10, 10), 110),
            (body(26, 0, n=4), 104),
            (body(1, None, prompt_logprobs=20, prompt=[5] * 6), 126),
            (body(20, 5, stream=True), 120),
        ):
            status, reply = await api.post(PATH, fields)
            assert (status, reply["error"]["code"]) == (413, "reply_too_large"), fields
            assert f"The reply may have {count} log-probabilities, at most 100 fit" in reply["error"]["message"]
        assert api.replies.num_bytes == 0


async def test_replies_share_the_memory_until_they_end(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, max_reply_memory=NUM_SCORES * BYTES_PER_SCORE) as api:
        first = asyncio.create_task(api.post(PATH, body(9, 9)))
        request = await api.engine.added()
        status, reply = await api.post(PATH, body(2, 9))
        assert (status, reply["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "--max-reply-memory" in reply["error"]["message"]
        for fitting in (body(1, 9), body(60, None)):  # ten scores are left, and text needs none
            other = asyncio.create_task(api.post(PATH, fitting))
            end_of(api, await api.engine.added())
            assert (await other)[0] == 200
        end_of(api, request)
        assert (await first)[0] == 200
        assert api.replies.num_bytes == 0
        last = asyncio.create_task(api.post(PATH, body(10, 9)))
        end_of(api, await api.engine.added())
        assert (await last)[0] == 200


async def test_client_that_leaves_gives_its_memory_back(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, max_reply_memory=NUM_SCORES * BYTES_PER_SCORE) as api:
        leaving = asyncio.create_task(api.post(PATH, body(9, 9)))
        await api.engine.added()
        assert api.replies.num_bytes == 90 * BYTES_PER_SCORE
        leaving.cancel()
        await api.engine.was_aborted()
        assert api.replies.num_bytes == 0


async def test_outputs_that_a_slow_client_does_not_take_are_joined(tokenizer: Tokenizer) -> None:
    """They gather in a few objects, and the client gets each token once when it reads again."""
    async with running_api(tokenizer) as api:
        reply = asyncio.create_task(api.post(PATH, body(60, 1)))
        request = await api.engine.added()
        (stream,) = {id(s): s for s in api.connection._streams.values()}.values()
        consumer, stream._consumer = stream._consumer, None  # the client takes nothing
        for number in range(60):
            api.engine.output(request, [35 + number % 20], finish_reason="length" if number == 59 else None)
        await api.engine.is_heard()
        assert len(stream._outputs) == 4
        stream._consumer = consumer
        stream.push()
        status, found = await reply
        assert status == 200
        assert len(found["choices"][0]["logprobs"]["tokens"]) == 60
        assert found["usage"]["completion_tokens"] == 60


async def test_outputs_are_pushed_a_few_at_a_time(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, max_model_len=4096) as api:
        reply = asyncio.create_task(api.post(PATH, body(8, None, n=8)))
        requests = [await api.engine.added() for _ in range(8)]
        stream = api.connection._streams[requests[0].request_id]
        consumer = stream._consumer
        assert consumer is not None
        sizes: list[int] = []
        push = consumer.push

        def note(outputs: list[RequestOutput]) -> None:
            sizes.append(len(outputs))
            push(outputs)

        consumer.push = note  # type: ignore[method-assign]
        outputs = [RequestOutput(request.request_id, [35]) for _ in range(7) for request in requests]
        outputs += [RequestOutput(request.request_id, [35], finish_reason="length") for request in requests]
        api.engine.say(StepOutputs(outputs))
        status, found = await reply
        assert status == 200
        assert sizes == [16, 16, 16, 16]
        assert [choice["text"] for choice in found["choices"]] == ["A" * 8] * 8
        assert msgspec.json.encode(found["usage"]["completion_tokens"]) == b"64"
