"""Moves a request to a replica and its reply back, with one retry while nothing was produced.

A request whose replica is lost, or not serving, before any content of the reply has arrived is sent to another replica,
once; one that reads or continues a stored response, to the same replica if that is still there, since only it has the
response. A stream that breaks after content has arrived ends with one error event in the form of its API. Whole events only
are passed on, so that an error event never follows half of another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Final

from jaxserve.apis.routes import ApiStyle, Route
from jaxserve.errors import RequestError, UnavailableError
from jaxserve.http.errors import error_response
from jaxserve.http.handler import end_of
from jaxserve.http.sse import frame
from jaxserve.ray.wire import ReplyHead, ReplyPart, WireRequest

Send = Callable[[WireRequest], AsyncGenerator[ReplyPart, None]]
"""Sends a request to a replica, and yields the parts of its reply."""

_EVENT_END: Final = b"\n\n"
LOST: Final = "The replica stopped while the request was running."


@dataclass(slots=True)
class _Attempt:
    """One reply, as far as it has arrived."""

    parts: AsyncGenerator[ReplyPart, None]
    head: ReplyHead


class Relay:
    """One request from its arrival to the end of its reply."""

    def __init__(
        self, send: Send, request: WireRequest, route: Route | None, lost: tuple[type[Exception], ...]
    ) -> None:
        """route: the request's, None if there is no such route. lost: what `send` raises if a replica is gone."""
        self._send = send
        self._request = request
        self._route = route
        self._lost = lost
        self._may_retry = True
        self._attempt: _Attempt | None = None

    async def open(self) -> tuple[ReplyHead, AsyncIterator[bytes]]:
        """Return the head of the reply and the rest of it. Whole replies are complete before their head is returned."""
        while True:
            attempt: _Attempt | None = None
            try:
                attempt = await self._start()
                if attempt.head.is_event_stream:
                    return attempt.head, self._events(attempt)
                body = b"".join([part async for part in attempt.parts if isinstance(part, bytes)])
            except self._lost:
                if self._take_retry(attempt):
                    continue
                return self._failed_reply()
            if attempt.head.status == UnavailableError.status and self._take_retry(attempt):
                continue
            return (attempt.head, _once(body)) if attempt.head.headers else self._failed_reply()

    async def close(self) -> None:
        """Abort the request if its reply has not ended: the client is gone."""
        if self._attempt is not None:
            await self._attempt.parts.aclose()

    async def _start(self) -> _Attempt:
        parts = self._send(self._request)
        head = await anext(parts)
        assert isinstance(head, ReplyHead), "the first part is the head"
        self._attempt = _Attempt(parts, head)
        return self._attempt

    async def _events(self, attempt: _Attempt) -> AsyncIterator[bytes]:
        """Yield whole events until the stream's last one."""
        has_content, is_over, rest = False, False, b""
        while True:
            try:
                async for part in attempt.parts:
                    assert isinstance(part, bytes), "only the first part is a head"
                    whole, separator, rest = (rest + part).rpartition(_EVENT_END)
                    events = whole + separator
                    if not has_content and _begins_with_error(events) and self._take_retry(attempt):
                        break
                    has_content = has_content or _has_content(events)
                    is_over = is_over or self._is_last(events)
                    if events:
                        yield events
                else:
                    if not is_over:
                        yield self._last_event(UnavailableError(LOST))
                    return
            except self._lost:
                if is_over:
                    return
                if has_content or not self._take_retry(attempt):
                    yield self._last_event(UnavailableError(LOST))
                    return
            following = await self._restart()
            if following is None:
                yield self._last_event(UnavailableError(LOST))
                return
            attempt, rest = following, b""

    async def _restart(self) -> _Attempt | None:
        """Return the stream of another replica; None if it has none."""
        with contextlib.suppress(*self._lost):
            attempt = await self._start()
            if attempt.head.is_event_stream:
                return attempt
            await attempt.parts.aclose()
        return None

    def _take_retry(self, failed: _Attempt | None) -> bool:
        """Return True once; the next attempt avoids the replica that failed. None: its replica is not known."""
        if not self._may_retry:
            return False
        self._may_retry = False
        if failed is not None:
            self._request = replace(self._request, avoid=failed.head.replica)
        return True

    def _is_last(self, events: bytes) -> bool:
        """Return True if the stream's last event is among `events`."""
        end = b"" if self._route is None else end_of(self._route)
        if end:
            return events.endswith(end)
        return any(mark in events for mark in _LAST_EVENTS)

    def _last_event(self, error: RequestError) -> bytes:
        if self._route is None:
            return b""
        body = self._route.style.error_body(error, "")
        return frame(body) + end_of(self._route)

    def _failed_reply(self) -> tuple[ReplyHead, AsyncIterator[bytes]]:
        head, body = error_reply(UnavailableError(LOST), ApiStyle() if self._route is None else self._route.style)
        return head, _once(body)


def error_reply(error: RequestError, style: ApiStyle) -> tuple[ReplyHead, bytes]:
    """Return the head and the body of a reply that no replica gives."""
    response = error_response(error, body=lambda shown: style.error_body(shown, ""))
    body = response.body
    assert isinstance(body, bytes), "errors are JSON"
    headers = tuple((name, value) for name, value in response.headers.items() if name.lower() != "content-length")
    return ReplyHead(response.status, headers, ""), body


_LAST_EVENTS: Final = (
    b"event: message_stop\n",
    b"event: error\n",
    b"event: response.completed\n",
    b"event: response.failed\n",
    b"event: response.incomplete\n",
)
"""Beginnings of the last events of streams without a closing line."""


def _has_content(events: bytes) -> bool:
    """Return True if one of `events` is more than a comment."""
    return any(event and not event.startswith(b":") for event in events.split(_EVENT_END))


def _begins_with_error(events: bytes) -> bool:
    first = next((event for event in events.split(_EVENT_END) if event and not event.startswith(b":")), b"")
    return first.startswith((b'data: {"error":', b"event: error\n"))


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body
