"""Outputs reach their consumer inside the loop that receives them; slow and failing consumers harm no other."""

from __future__ import annotations

import asyncio
import socket

import pytest

from jaxserve.frontend.engine_client.output_stream import PushConsumer
from jaxserve.ipc.messages import RequestOutput, StepOutputs
from jaxserve.types import RequestId
from tests.unit.apis.test_replies import events, ids
from tests.unit.frontend.test_client import add
from tests.unit.running_api import Api

OUTPUTS = [RequestOutput(RequestId("a"), [1])]


async def test_consumer_has_the_outputs_when_push_returns() -> None:
    seen: list[list[RequestOutput]] = []
    with PushConsumer(lambda outputs: seen.append(outputs) is None, 0) as consumer:
        consumer.push(OUTPUTS)
        consumer.push(OUTPUTS)
        assert seen == [OUTPUTS, OUTPUTS]
        consumer.stop()
        assert not consumer.is_open
        assert await consumer.end()


async def test_consumer_that_takes_no_more_is_closed() -> None:
    with PushConsumer(lambda outputs: False, 0) as consumer:
        consumer.push(OUTPUTS)
        assert not consumer.is_open
        assert await consumer.end()


async def test_silence_ends_the_run() -> None:
    with PushConsumer(lambda outputs: True, 0.01) as consumer:
        assert not await consumer.end()


async def test_outputs_put_off_the_end_by_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda: now)
    with PushConsumer(lambda outputs: True, 10) as consumer:
        now = 6.0
        consumer.push(OUTPUTS)
        now = 10.0
        await turn_of_the_loop()
        assert consumer.is_open
        now = 16.0
        await turn_of_the_loop()
        assert not consumer.is_open
        assert not await consumer.end()


async def test_consumer_that_fails_costs_the_others_nothing(api: Api) -> None:
    def fail(outputs: list[RequestOutput]) -> bool:
        raise ValueError("an error of the consumer")

    seen: list[RequestOutput] = []

    def keep(outputs: list[RequestOutput]) -> bool:
        seen.extend(outputs)
        return True

    with api.client.submit([add("bad")]) as bad, api.client.submit([add("good")]) as good:
        failing, feeding = asyncio.create_task(bad.consume(fail)), asyncio.create_task(good.consume(keep))
        requests = [await api.engine.added() for _ in range(2)]
        outputs = [RequestOutput(request.request_id, [1], finish_reason="stop") for request in requests]
        api.engine.say(StepOutputs(outputs))
        with pytest.raises(ValueError, match="an error of the consumer"):
            await failing
        assert await feeding
    assert [output.request_id for output in seen] == ["good"]


async def test_choices_of_a_request_share_one_write(api: Api) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(post(b'{"prompt": "x", "n": 3, "stream": true}'))
    requests = [await api.engine.added() for _ in range(3)]
    api.engine.output(requests[0], ids(api, "a"))
    await reader.readuntil(b"\n\n\r\n")
    api.engine.say(StepOutputs([RequestOutput(request.request_id, ids(api, "b")) for request in requests]))
    chunk = await reader.readuntil(b"\n\n\r\n")
    assert chunk.count(b'"text":"b"') == 3
    writer.close()


async def test_outputs_of_a_slow_client_gather_until_it_reads_on(api: Api) -> None:
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    narrow.connect(("127.0.0.1", api.port))
    narrow.setblocking(False)
    body = b'{"messages": [{"role": "user", "content": "x"}], "stream": true, "logprobs": true, "top_logprobs": 20}'
    narrow.sendall(post(body, "/v1/chat/completions"))
    request = await api.engine.added()
    steps = [ids(api, "abcdefgh")] * 600
    for step in steps:  # 6 MB of chunks, more than the kernel's buffers hold
        api.engine.output(request, step)
    api.engine.output(request, ids(api, "."), finish_reason="length")
    await api.engine.is_heard()
    reader, writer = await asyncio.open_connection(sock=narrow)
    await reader.readuntil(b"\r\n\r\n")
    raw = b""
    while size := int(await reader.readline(), 16):
        raw += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    writer.close()
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in events(raw)]
    assert "".join(deltas) == "abcdefgh" * len(steps) + "."
    assert len(deltas) < len(steps)
    tokens = [
        token for chunk in events(raw) for token in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert len(tokens) == 8 * len(steps) + 1


async def test_stream_over_http_1_0_ends_with_the_connection(api: Api) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(post(b'{"prompt": "x", "stream": true}').replace(b"HTTP/1.1", b"HTTP/1.0"))
    request = await api.engine.added()
    for text in "abc":
        api.engine.output(request, ids(api, text))
    api.engine.output(request, ids(api, "d"), finish_reason="length")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert "".join(chunk["choices"][0]["text"] for chunk in events(body)) == "abcd"
    writer.close()


async def turn_of_the_loop() -> None:
    """Let timers that are due run."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def post(body: bytes, path: str = "/v1/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
