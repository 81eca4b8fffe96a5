"""An event loop that measures its turns: the time in which it runs callbacks and looks at no socket."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

LONG_TURN_S: Final = 0.02
"""A turn that takes longer is counted: every other request waits meanwhile."""
_NUM_PERIODS: Final = 240
"""Periods whose longest turn is remembered: a minute of those of `api_process.WATCH_S`."""


class TurnSelector(selectors.DefaultSelector):  # the system's best one
    """A selector that measures the time between two calls of `select`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._woke_s: float | None = None
        self._longest_s = 0.0
        """The longest turn of the current period."""
        self._periods: deque[float] = deque(maxlen=_NUM_PERIODS)
        self.num_turns = 0
        self.num_long = 0
        """Number of turns that took more than LONG_TURN_S."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """End a turn, wait for events, and begin the next turn."""
        if self._woke_s is not None:
            seconds = self._clock() - self._woke_s
            self.num_turns += 1
            self.num_long += seconds > LONG_TURN_S
            if seconds > self._longest_s:
                self._longest_s = seconds
        found: list[tuple[selectors.SelectorKey, int]] = super().select(timeout)
        self._woke_s = self._clock()
        return found

    def end_period(self) -> float:
        """Begin another period; returns the seconds of the longest turn of the last ones."""
        self._periods.append(self._longest_s)
        self._longest_s = 0.0
        return max(self._periods)


class MeasuredLoop(asyncio.SelectorEventLoop):
    """asyncio's loop over a TurnSelector."""

    def __init__(self) -> None:
        self.turns = TurnSelector()
        super().__init__(self.turns)


def run_measured(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` as `asyncio.run` does, in a MeasuredLoop."""
    with asyncio.Runner(loop_factory=MeasuredLoop) as runner:
        return runner.run(main)
