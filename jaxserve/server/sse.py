"""Server-sent events over chunked HTTP: framing, headers, keep-alive, slow readers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from aiohttp import web

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
WRITE_TIMEOUT_S = 60.0
"""A client that takes nothing for this long counts as gone."""

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def frame(data: bytes) -> bytes:
    """One event. `data` is JSON on one line."""
    return b"data: %b\n\n" % data


class EventStream:
    """One response. The status line goes out with the first `send`, so that an early failure keeps its status.

    `send` waits while the client's buffers are full: the caller falls behind, its news gather, and one
    later event carries them all. It raises ConnectionResetError when the client is gone.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers=_HEADERS)

    @property
    def has_started(self) -> bool:
        return self._response.prepared

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def send(self, frames: Iterable[bytes]) -> None:
        """Write frames as one chunk."""
        if not self._response.prepared:
            await self._response.prepare(self._request)
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._response.write(b"".join(frames))
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()  # closing would wait for the client, for ever
            raise ConnectionResetError(f"the client took nothing for {WRITE_TIMEOUT_S:.0f} s") from None

    async def close(self, frames: Iterable[bytes] = ()) -> None:
        """Write `frames`, `[DONE]`, and the end of the body."""
        await self.send([*frames, DONE])
        await self._response.write_eof()
