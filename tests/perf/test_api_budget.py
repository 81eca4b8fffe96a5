"""The work of the API process per streamed token, counted: no measured time, which would depend on the machine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Iterator

import msgspec

from jaxserve.ipc.messages import AddRequest, Ready, RequestOutput, StepOutputs
from jaxserve.ipc.transport import decode_from_engine, encode
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.call_counts import CallCounts
from tests.unit.running_api import MODEL_INFO, Api, running_api

NUM_STEPS = 10
MANY_STREAMS = 32
WITHOUT_KEEP_ALIVES_S = 3600.0
MAX_CALLS_PER_TOKEN = 110
"""Python and C functions together; 86 with Python 3.11 and 3.12 when this limit was set."""
EVENT_LOOP_WORK = (
    "BaseEventLoop.call_soon",  # each wake-up of a task is one
    "BaseEventLoop.call_soon_threadsafe",
    "BaseEventLoop.create_task",
    "BaseEventLoop.call_later",
    "BaseEventLoop.call_at",
    "Timeout.__init__",
    "BaseEventLoop._run_once",  # polls the sockets
)

TOKEN_OF_A = 35
BODY = b'{"messages": [{"role": "user", "content": "x"}], "stream": true}'
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


async def test_token_costs_one_encode_and_one_send_and_no_wake_up_or_timer(tokenizer: Tokenizer) -> None:
    one, many = await calls_of_streams(tokenizer, 1), await calls_of_streams(tokenizer, MANY_STREAMS)
    more = Counter(many)
    more.subtract(one)
    num_tokens = (MANY_STREAMS - 1) * NUM_STEPS
    for name in EVENT_LOOP_WORK:
        assert more[name] == 0, f"{name}: {one[name]} calls for 1 stream, {many[name]} for {MANY_STREAMS}"
    assert more["Encoder.encode"] == more["socket.send"] == num_tokens
    assert more["IncrementalDetokenizer.push"] == num_tokens
    assert many["Decoder.decode"] == NUM_STEPS  # one message per step, however many streams it is for
    assert more.total() < MAX_CALLS_PER_TOKEN * num_tokens, more.most_common()


async def test_wake_ups_timers_and_timeouts_are_counted_by_these_names() -> None:
    """Do what the API process must not do per token, so that a wrong name in `EVENT_LOOP_WORK` cannot pass."""
    loop = asyncio.get_running_loop()
    with CallCounts() as calls:
        async with asyncio.timeout(60):
            await loop.create_task(asyncio.sleep(0))
        loop.call_later(60, print).cancel()
        loop.call_soon_threadsafe(len, "")
    assert all(calls[name] > 0 for name in EVENT_LOOP_WORK), calls


async def calls_of_streams(tokenizer: Tokenizer, num_streams: int) -> CallCounts:
    """Count the calls from the engine's frames to the sockets of `num_streams` streaming clients."""
    async with running_api(tokenizer, keep_alive_s=WITHOUT_KEEP_ALIVES_S) as api:
        api.engine.say(Ready(msgspec.structs.replace(MODEL_INFO, max_num_seqs=MANY_STREAMS)))
        await api.engine.is_heard()
        with connected(api.port, num_streams) as clients:
            frame = step_frame(await started(api, clients))
            with CallCounts() as calls:
                for _ in range(NUM_STEPS):
                    api.engine.say(decode_from_engine(frame))
                    await api.engine.is_heard()
            for client in clients:
                await until_received(client, b"data: ", NUM_STEPS)  # one chunk per token: none were merged
            return calls


async def started(api: Api, clients: list[socket.socket]) -> list[AddRequest]:
    """Send one request per client and return them after each client has received its first token."""
    for client in clients:
        client.sendall(REQUEST)
        client.setblocking(False)
    requests = [await api.engine.added() for _ in clients]
    api.engine.say(decode_from_engine(step_frame(requests)))
    for client in clients:
        await until_received(client, b'"content":"A"', 1)
    return requests


async def until_received(client: socket.socket, text: bytes, count: int) -> None:
    received = b""
    async with asyncio.timeout(60):
        while received.count(text) < count:
            received += await asyncio.get_running_loop().sock_recv(client, 1 << 16)


def step_frame(requests: list[AddRequest]) -> bytes:
    """Encode a step that gives each request the token `A`."""
    return encode(StepOutputs([RequestOutput(request.request_id, [TOKEN_OF_A]) for request in requests]))


@contextlib.contextmanager
def connected(port: int, num_clients: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(num_clients)]
