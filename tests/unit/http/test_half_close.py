"""Clients that close only their sending side: what the server writes to find out whether they have left, and when."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from jaxserve.config import ConnectionConfig
from jaxserve.http.connection import connection_of
from jaxserve.http.listener import bind_sockets, listening
from jaxserve.http.sse import EventStream
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.loop_clock import LoopClock
from tests.unit.apis.test_replies import ids
from tests.unit.running_api import Api, running_api

WAIT_S = 60.0
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMENT = b"3\r\n:\n\n\r\n"
END = b"0\r\n\r\n"


def post(body: object, version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def test_a_stream_is_probed_before_its_head_and_between_its_events(api: Api) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(post({"prompt": "x", "max_tokens": 2, "stream": True}))
    writer.write_eof()
    request = await api.engine.added()
    before = await asyncio.wait_for(reader.readuntil(CONTINUE), WAIT_S)
    api.engine.output(request, ids(api, "a"))
    received = before + await asyncio.wait_for(reader.readuntil(COMMENT), WAIT_S)
    api.engine.output(request, ids(api, "b"), finish_reason="length")
    received += await asyncio.wait_for(reader.read(), WAIT_S)
    head, _, body = received.replace(CONTINUE, b"").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert (body.count(END), body.endswith(END)) == (1, True)
    assert b"data: [DONE]" in body
    writer.close()


async def test_nothing_follows_the_end_of_a_stream() -> None:
    async def handle(http: web.Request) -> web.StreamResponse:
        events, connection = EventStream(http), connection_of(http)
        await events.send([b"data: a\n\n"])
        await events.close([b"data: b\n\n"])
        while not connection._is_half_closed:  # noqa: ASYNC110  (nothing announces it)
            await asyncio.sleep(0)
        await LoopClock().advance(1.0)
        return events.response

    app = web.Application()
    app.router.add_get("/", handle)
    with bind_sockets("127.0.0.1", 0, 1)[0] as listener:
        async with listening(app, [listener], ConnectionConfig(), max_connections=8):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            writer.write_eof()
            received = await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()
    assert received.endswith(b"data: b\n\n\r\n" + END)


async def test_http_1_0_has_no_interim_responses(api: Api) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(post({"prompt": "x", "max_tokens": 2}, "1.0"))
    request = await api.engine.added()
    writer.write_eof()
    assert await api.engine.was_aborted() == request.request_id
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
    writer.close()


@pytest.mark.parametrize("closes_early", [True, False])
async def test_the_rest_of_a_refused_body_is_not_waited_for(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, closes_early: bool
) -> None:
    """The reply may leave before the client closes its sending side, or after it."""
    init: Any = RequestHandler.__init__
    monkeypatch.setitem(init.__kwdefaults__, "lingering_time", 3600.0)
    async with running_api(tokenizer, api_key="secret") as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(post({"prompt": "x"})[:-1])
        if closes_early:
            writer.write_eof()
        received = await asyncio.wait_for(reader.readuntil(b"}}"), WAIT_S)
        assert received.startswith(b"HTTP/1.1 401 ")
        if not closes_early:
            writer.write_eof()
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()
