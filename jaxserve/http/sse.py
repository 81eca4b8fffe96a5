"""Server-sent events over chunked HTTP: framing, headers, keep-alive, slow readers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from aiohttp import web

from jaxserve.apis.schema.encode import encode_in_parts
from jaxserve.http.connection import connection_of

KEEP_ALIVE = b": keep-alive\n\n"
_EMPTY_COMMENT = b"3\r\n:\n\n\r\n"
"""A comment as one chunk of a body."""

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


_encode = msgspec.json.Encoder().encode


def frame(chunk: msgspec.Struct, encode: Callable[[msgspec.Struct], bytes] = _encode) -> bytes:
    """Return one event: JSON on one line. The tag of a tagged struct is the event's name."""
    name = type(chunk).__struct_config__.tag
    if name is None:
        return b"data: %b\n\n" % encode(chunk)
    return b"event: %b\ndata: %b\n\n" % (str(name).encode(), encode(chunk))


async def frames_that_repeat(chunks: Sequence[msgspec.Struct], *, is_large: bool) -> list[bytes]:
    """Return events that may repeat the request's body; those of a large one are encoded in a thread, in parts."""
    if is_large:
        return await asyncio.to_thread(lambda: [frame(chunk, encode_in_parts) for chunk in chunks])
    return [frame(chunk) for chunk in chunks]


class EventStream:
    """One response. The status line is sent with the first `send`, so that an early failure keeps its status.

    `push` writes without waiting, as long as there is space; `send` waits until the client has read enough of what
    was written: meanwhile outputs gather, and one later event carries them all. Both raise ConnectionResetError if the
    client is gone.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._connection = connection_of(request)
        self._response = web.StreamResponse(headers=_HEADERS)
        self._is_chunked = False

    @property
    def has_started(self) -> bool:
        return self._response.prepared

    @property
    def has_space(self) -> bool:
        """True if `push` may be called: the response has begun and the client keeps up."""
        return self._response.prepared and not self._connection.writing_paused

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Add headers, unless they were sent already."""
        if not self._response.prepared:
            self._response.headers.update(headers)

    def push(self, frames: Iterable[bytes]) -> None:
        """Write frames as one chunk, from any function of the event loop. Only while there is space."""
        data = b"".join(frames)
        transport = self._connection.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    async def send(self, frames: Iterable[bytes]) -> None:
        """Write frames, and wait for space."""
        if not self._response.prepared:
            await self._response.prepare(self._request)
            self._is_chunked = self._response.headers.get("Transfer-Encoding") == "chunked"  # HTTP/1.0 has none
        async with self._connection.patience():
            await self._response.write(b"".join(frames))
            self._connection.stream_probe = _EMPTY_COMMENT if self._is_chunked else b""
            await self._connection.wait_writable()

    async def close(self, frames: Iterable[bytes] = ()) -> None:
        """Write `frames` and the end of the body."""
        if not self._response.prepared:
            await self._response.prepare(self._request)
        self._connection.stream_probe = b""  # nothing may follow the end
        async with self._connection.patience():
            await self._response.write_eof(b"".join(frames))
