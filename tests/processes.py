"""Linux's state of a process, and stopping a process for a test."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

STOP_TIMEOUT_S = 60.0


def freeze(pid: int) -> None:
    """Stop process `pid` and return once it has stopped: before that it would still take a signal sent after this one."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while status_of(pid, "State") != "T":
        assert time.monotonic() < deadline, "never stopped"
        time.sleep(0.001)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop process `pid` for the duration of the block."""
    freeze(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Return True if this signal waits until process `pid` runs again."""
    return bool(int(status_of(pid, "ShdPnd"), 16) >> (number - 1) & 1)


def status_of(pid: int, field: str) -> str:
    """Return the first word of a field of /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{field}:"))
