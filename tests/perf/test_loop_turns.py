"""The work of one turn of the API process's event loop, counted in calls: it is bounded whatever clients and engine send.

A call takes 50 to 500 ns, so MAX_CALLS are a few milliseconds. Work in threads is not counted: a turn goes on beside it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from types import FrameType, TracebackType
from typing import Any

import msgspec
import pytest

from jaxserve.ipc.messages import Ready, RequestOutput, StepOutputs, TokenLogprobs
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.running_api import MODEL_INFO, Api, running_api

MAX_CALLS = 25_000
NUM_CHOICES = 128
NUM_TOP = 20
NUM_TOKENS = 40
TOKEN_OF_A = 35
SCORES = TokenLogprobs(-1.0, list(range(40, 60)), [-1.0 - i for i in range(NUM_TOP)])


class TurnCounts:
    """The most calls that this thread made between two polls of the event loop's sockets."""

    def __init__(self) -> None:
        self.most = 0
        self.num_turns = 0
        self._calls = 0

    def __enter__(self) -> TurnCounts:
        sys.setprofile(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ == "poll":
            self.most = max(self.most, self._calls)
            self._calls = 0
            self.num_turns += 1
        elif event in ("call", "c_call"):
            self._calls += 1


async def test_turn_is_counted_up_to_the_poll() -> None:
    with TurnCounts() as turns:
        await asyncio.sleep(0)
        for _ in range(1000):
            len("")
        await asyncio.sleep(0)
    assert turns.num_turns >= 1
    assert 1000 <= turns.most < 1500


async def ready(api: Api) -> None:
    api.engine.say(Ready(msgspec.structs.replace(MODEL_INFO, max_num_seqs=NUM_CHOICES, max_model_len=4096)))
    await api.engine.is_heard()


def body(**fields: Any) -> bytes:
    message = {"messages": [{"role": "user", "content": "x"}], "max_tokens": NUM_TOKENS, "logprobs": True}
    data = json.dumps(message | {"top_logprobs": NUM_TOP} | fields).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n%b" % (len(data), data)


async def received(reader: asyncio.StreamReader, end: bytes) -> bytes:
    data = b""
    async with asyncio.timeout(60):
        while end not in data[-200:]:
            part = await reader.read(1 << 16)
            assert part, data[-500:]
            data += part
    return data


async def test_step_with_many_scored_choices_takes_several_turns(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer) as api:
        await ready(api)
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port, limit=1 << 24)
        writer.write(body(n=NUM_CHOICES, stream=True))
        requests = [await api.engine.added() for _ in range(NUM_CHOICES)]
        with TurnCounts() as turns:
            for number in range(3):
                end = {"finish_reason": "length"} if number == 2 else {}
                outputs = [RequestOutput(request.request_id, [TOKEN_OF_A], [SCORES], **end) for request in requests]
                api.engine.say(StepOutputs(outputs))
            await api.engine.is_heard()
            data = await received(reader, b"[DONE]")
        writer.close()
        assert data.count(b'"content":"A"') == 3 * NUM_CHOICES
        assert turns.most < MAX_CALLS, f"{turns.most} calls in one of {turns.num_turns} turns"


@pytest.mark.slow
async def test_large_reply_is_formatted_beside_the_event_loop(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer) as api:
        await ready(api)
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port, limit=1 << 24)
        writer.write(body(n=NUM_CHOICES))
        requests = [await api.engine.added() for _ in range(NUM_CHOICES)]
        with TurnCounts() as turns:
            for number in range(NUM_TOKENS):
                end = {"finish_reason": "length"} if number == NUM_TOKENS - 1 else {}
                outputs = [RequestOutput(request.request_id, [TOKEN_OF_A], [SCORES], **end) for request in requests]
                api.engine.say(StepOutputs(outputs))
                await api.engine.is_heard()
            data = await received(reader, b"}}")
        writer.close()
        assert data.startswith(b"HTTP/1.1 200")
        assert turns.most < MAX_CALLS, f"{turns.most} calls in one of {turns.num_turns} turns"
