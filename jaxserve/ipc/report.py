"""Reports of a start: its phases on the machine's monotonic clock, which all processes share, its programs, and the model's work.

Phases may overlap: a span says when a phase began and ended, not how much work it was.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Literal

import msgspec

ProgramSource = Literal["cache", "compiled", "cache_later", "later"]
"""cache_later: it is in the cache, and loaded after readiness. later: it is not, and compiled after readiness."""


class PhaseSpan(msgspec.Struct, frozen=True, array_like=True):
    phase: str
    start_s: float
    """`time.monotonic()`."""
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class ProgramReport(msgspec.Struct, frozen=True, array_like=True):
    """The origin of one program. Seconds are wall clock; several programs are made at the same time."""

    name: str
    source: ProgramSource
    seconds: float


class ModelWork(msgspec.Struct, frozen=True, array_like=True):
    """Work of a model's weights, from which the use of a device is computed. Attention and the KV cache are not counted."""

    layer_flops: int
    """Operations of the layers' matrices for one token, on all devices together."""
    head_flops: int
    """Operations of the output matrix for one token."""
    read_bytes: int
    """Bytes of weights that a step reads on one device, those of all experts among them."""


class StartupReport(msgspec.Struct, frozen=True, array_like=True):
    """A whole start, or one process's part of it."""

    phases: list[PhaseSpan] = []
    programs: list[ProgramReport] = []


class PhaseClock:
    """Collects the spans of one process, from any thread."""

    def __init__(self) -> None:
        self.spans: list[PhaseSpan] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block; a block that raises leaves no span."""
        start_s = time.monotonic()
        yield
        self.add(name, start_s)

    def take(self) -> list[PhaseSpan]:
        """Return the spans so far, and forget them."""
        spans, self.spans = self.spans, []
        return spans

    def add(self, name: str, start_s: float) -> None:
        """Add a phase that began at `start_s` and ends now."""
        self.spans.append(PhaseSpan(name, start_s, time.monotonic()))


def process_start_s() -> float:
    """Return the start of this process on the monotonic clock; now, if the system does not report it."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return time.monotonic()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(age_s, 0.0)  # read after the age: a process that waits in between is not older for it
