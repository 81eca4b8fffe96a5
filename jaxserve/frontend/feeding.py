"""News handed to a reader the moment they arrive, without waking a task for each.

A step of the engine brings news of every stream. Waking one task per stream to write one token costs more
than the token; so the reader's function is called by whoever brings the news, and the reader's task sleeps
until it has something to wait for: the end, room in a buffer, or a keep-alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from jaxserve.ipc.messages import RequestOutput

Consumer = Callable[[list[RequestOutput]], bool]
"""Takes news, oldest first; returns whether it can take more right away."""


class Feeding:
    """One reader being fed. Leave it as a context manager: its timer ends with it."""

    def __init__(self, consume: Consumer, idle_s: float) -> None:
        """`idle_s`: stop after this long without news; 0 waits for ever."""
        self._consume = consume
        self._idle_s = idle_s
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[Exception | bool] = self._loop.create_future()
        self._last_news = self._loop.time()
        self._timer = self._loop.call_later(idle_s, self._stop_if_idle) if idle_s else None

    def __enter__(self) -> Feeding:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @property
    def is_hungry(self) -> bool:
        """Whether news may be given."""
        return not self._end.done()

    def give(self, news: list[RequestOutput]) -> None:
        """Call the reader's function. What it raises ends the feeding and is raised in the reader's task."""
        self._last_news = self._loop.time()
        try:
            wants_more = self._consume(news)
        except Exception as error:  # the reader's own: others are fed by the same loop
            self._end.set_result(error)
        else:
            if not wants_more:
                self._end.set_result(True)

    def stop(self) -> None:
        """There will be no more news."""
        if not self._end.done():
            self._end.set_result(True)

    async def end(self) -> bool:
        """Wait for the end; False when news were missing for too long."""
        outcome = await self._end
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _stop_if_idle(self) -> None:
        """Moved on by news instead of being set anew for each."""
        due = self._last_news + self._idle_s
        if self._loop.time() < due:
            self._timer = self._loop.call_at(due, self._stop_if_idle)
        elif not self._end.done():
            self._end.set_result(False)
