"""The event loop's clock, moved by a test: time-outs end when the test says so, not when the machine is slow."""

from __future__ import annotations

import asyncio

NUM_TURNS = 8
"""Turns of the loop after which callbacks of due timers, and the tasks that they wake, have run."""


class LoopClock:
    """Adds the seconds it was advanced by to the running loop's clock, for as long as that loop runs."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time
        self._ahead_s = 0.0
        self._loop.time = self._now  # type: ignore[method-assign]

    def _now(self) -> float:
        return self._time() + self._ahead_s

    async def advance(self, seconds: float) -> None:
        """Run the timers that are due by then, each once."""
        self._ahead_s += seconds
        for _ in range(NUM_TURNS):
            await asyncio.sleep(0)
