"""The end of a request is not a matter of opinion: a request that a proxy could read in another way ends the connection."""

from __future__ import annotations

import asyncio

import pytest

from jaxserve.config import ConnectionConfig
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.loop_clock import LoopClock
from tests.unit.running_api import Api, running_api

KEEP_ALIVE_S = 75.0
WAIT_S = 60.0
POST = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"
BODY = b'{"prompt": "x"}'
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)
END = b"0\r\n\r\n"
NEXT = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
"""Would be a request of its own to whom the one before it ended."""

AMBIGUOUS = {
    "two lengths": POST + b"Content-Length: 15\r\nContent-Length: 5\r\n\r\n" + BODY,
    "a list of lengths": POST + b"Content-Length: 15, 15\r\n\r\n" + BODY,
    "a length with a sign": POST + b"Content-Length: +15\r\n\r\n" + BODY,
    "a length in Python's form": POST + b"Content-Length: 1_5\r\n\r\n" + BODY,
    "a length and chunks": CHUNKED + b"Content-Length: 15\r\n\r\n" + END,
    "another encoding": POST + b"Transfer-Encoding: xchunked\r\n\r\n" + END,
    "two encodings": CHUNKED + b"Transfer-Encoding: chunked\r\n\r\n" + END,
    "an encoding after chunks": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n" + END,
    "a space before a colon": POST + b"Transfer-Encoding : chunked\r\n\r\n" + END,
    "a folded header": POST + b"X: a\r\n b\r\nContent-Length: 15\r\n\r\n" + BODY,
    "a carriage return in a header": POST + b"X: a\rContent-Length: 0\r\nContent-Length: 15\r\n\r\n" + BODY,
    "a zero byte in a header": POST + b"X: a\x00b\r\nContent-Length: 15\r\n\r\n" + BODY,
    "a line in a chunk extension": CHUNKED + b"\r\n2;\nxx\r\n4c\r\n" + END,
    "a negative chunk": CHUNKED + b"\r\n-2\r\nxx\r\n" + END,
    "a chunk in Python's form": CHUNKED + b"\r\n0x2\r\nxx\r\n" + END,
    "a chunk that is longer than it says": CHUNKED + b"\r\n2\r\nxxyy" + END,
    "a line feed after a chunk's size": CHUNKED + b"\r\nf\n" + BODY + b"\r\n" + END,
    "trailers without end": CHUNKED + b"\r\n" + CHUNK + b"0\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
}


async def answer(api: Api, sent: bytes) -> bytes:
    """Return all that comes back for bytes on a connection of their own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(sent)
    received = await asyncio.wait_for(reader.read(), WAIT_S)
    writer.close()
    return received


@pytest.mark.parametrize("case", AMBIGUOUS)
async def test_a_request_with_two_readings_gets_one_reply_and_nothing_after_it_is_read(api: Api, case: str) -> None:
    received = await answer(api, AMBIGUOUS[case] + NEXT)
    assert received.count(b"HTTP/1.") == 1, received
    assert received.split(b" ", 2)[1] == b"400"
    assert b'"code":"invalid_http"' in received
    assert api.client.admission.num_sequences == 0


async def test_chunks_and_requests_in_a_row_are_answered_in_order(api: Api) -> None:
    received = await answer(api, CHUNKED + b"\r\n" + CHUNK + END + NEXT)
    assert received.count(b"HTTP/1.1 200 ") == 2
    assert received.index(b'"tokens"') < received.index(b'"version"')


async def test_headers_of_a_later_request_that_do_not_end_close_the_connection(tokenizer: Tokenizer) -> None:
    """The time for headers is for the first request; that between two requests includes those of the second."""
    async with running_api(tokenizer, connection=ConnectionConfig(keep_alive_timeout=KEEP_ALIVE_S)) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b'"}'), WAIT_S)
        writer.write(b"GET /version HTTP/1.1\r\nHost: ")
        assert (await api.post("/tokenize", {"prompt": "x"}))[0] == 200  # by now the server has these bytes
        clock = LoopClock()
        for _ in range(2):  # aiohttp looks again when the first look came early
            await clock.advance(KEEP_ALIVE_S)
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()
