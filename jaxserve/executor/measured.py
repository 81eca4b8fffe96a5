"""Numbers that cost a system call: measured at most once a second, however often they are reported."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

T = TypeVar("T")

PERIOD_S: Final = 1.0


class Measured(Generic[T]):
    """The result of a function, at most `PERIOD_S` old."""

    def __init__(self, measure: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        self._measure = measure
        self._clock = clock
        self._value, self._measured_s = measure(), clock()

    @property
    def value(self) -> T:
        if self._clock() >= self._measured_s + PERIOD_S:
            self._value, self._measured_s = self._measure(), self._clock()
        return self._value


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
