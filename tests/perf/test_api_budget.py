"""What a streamed token may cost the API process, as a ratio to the least it could cost in this very run."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator

import msgspec
import pytest

from jaxserve.ipc.codec import decode_from_engine, encode
from jaxserve.ipc.messages import AddRequest, Ready, RequestOutput, StepOutputs
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.server.conftest import FACTS, Api, running_api

pytestmark = pytest.mark.slow

NUM_STREAMS = 32
NUM_STEPS = 40
"""So few that the kernel keeps what nobody reads: no client shares the process's time."""
NUM_ROUNDS = 5
MAX_RATIO = 5.5
"""Measured: 2.4 to 3.2 on one processor, 4.4 to 4.9 on another. One task wake-up, timer and time-out per token made
it 5.7 to 6 on the first."""

TOKEN_OF_A = 35
BODY = b'{"messages": [{"role": "user", "content": "x"}], "stream": true}'
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


async def test_token_costs_little_more_than_decoding_and_sending_it(tokenizer: Tokenizer) -> None:
    with contextlib.closing(any_listener()) as listener:
        rounds = [(await cost_of_streams(tokenizer), cost_of_bare_sends(listener)) for _ in range(NUM_ROUNDS)]
    # The best round: in another one, somebody else may have had the processor's caches for a while.
    ratio, stream_us, bare_us = min((stream / bare, stream, bare) for stream, bare in rounds)
    assert ratio < MAX_RATIO, f"{stream_us:.1f} us a token, {bare_us:.1f} us bare"


async def cost_of_streams(tokenizer: Tokenizer) -> float:
    """Microseconds of CPU time per token from the engine's frame to the sockets of streaming clients."""
    async with running_api(tokenizer) as api:
        api.engine.say(Ready(msgspec.structs.replace(FACTS, max_num_seqs=NUM_STREAMS)))
        await api.engine.is_heard()
        with connected(api.port) as clients:
            requests = await begun(api, clients)
            frame = step_frame(requests)
            started = time.process_time()
            for _ in range(NUM_STEPS):
                api.engine.say(decode_from_engine(frame))
                await api.engine.is_heard()
            used_s = time.process_time() - started
            for client in clients:
                await until_received(client, b"data: ", NUM_STEPS)  # a chunk each: nothing gathered
            return 1e6 * used_s / (NUM_STEPS * NUM_STREAMS)


async def begun(api: Api, clients: list[socket.socket]) -> list[AddRequest]:
    """Requests whose replies have begun."""
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
    async with asyncio.timeout(10):
        while received.count(text) < count:
            received += await asyncio.get_running_loop().sock_recv(client, 1 << 16)


def cost_of_bare_sends(listener: socket.socket) -> float:
    """Microseconds of CPU time per token to decode the frame, spell the chunk and send it."""
    requests = [RequestOutput(f"{'0' * 32}-{i}", [TOKEN_OF_A]) for i in range(NUM_STREAMS)]  # type: ignore[arg-type]
    frame = encode(StepOutputs(requests))
    chunk = {"id": "chatcmpl-" + "0" * 32, "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    with connected(listener.getsockname()[1]) as clients, contextlib.ExitStack() as stack:
        servers = [stack.enter_context(listener.accept()[0]) for _ in clients]
        started = time.process_time()
        for _ in range(NUM_STEPS):
            decode_from_engine(frame)
            for server in servers:
                choice = {"index": 0, "delta": {"content": "A"}, "logprobs": None, "finish_reason": None}
                server.send(b"data: %b\n\n" % msgspec.json.encode({**chunk, "choices": [choice]}))
        return 1e6 * (time.process_time() - started) / (NUM_STEPS * NUM_STREAMS)


def step_frame(requests: list[AddRequest]) -> bytes:
    """A step that gives each request the token `A`."""
    return encode(StepOutputs([RequestOutput(request.request_id, [TOKEN_OF_A]) for request in requests]))


@contextlib.contextmanager
def connected(port: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(NUM_STREAMS)]


def any_listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=NUM_STREAMS)
