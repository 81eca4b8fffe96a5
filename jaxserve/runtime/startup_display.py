"""Progress of the start on stderr: bars on a terminal, else a line for the begin of a phase, and for the middle of a long one."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from jaxserve.http.operations.startup import StartupLog, label_of
from jaxserve.ipc.messages import StartupProgress
from jaxserve.log import report, writes_json

LONG_S: Final = 10.0
"""A phase that takes longer to its middle has a line there."""
_BYTES_PHASE = "load"
_MIB = 1 << 20


class StartupDisplay:
    """Shows the phases of the start inside a `with` block. After it the bars stay, and later messages are not shown."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        columns = (
            TextColumn("{task.description:<18}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        has_bars = sys.stderr.isatty() and not writes_json()
        self._bars = Progress(*columns, console=Console(stderr=True)) if has_bars else None
        self._clock = clock
        self._logs: dict[str, StartupLog] = {}
        self._tasks: dict[str, TaskID] = {}
        self._begun_s: dict[str, float] = {}
        """The times at which phases began that have no line for their middle yet."""
        self._shown: set[str] = set()
        self._is_closed = False

    def __enter__(self) -> StartupDisplay:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        if self._bars is not None:
            self._bars.stop()

    def show_compiled(self, done: int, total: int, name: str) -> None:
        """Show that the program `name` is compiled."""
        self.show(StartupProgress("compile", done, total, name))

    def show_loaded(self, done: int, total: int, name: str) -> None:
        """Show that the parameter `name` is loaded; `done` and `total` are bytes."""
        self.show(StartupProgress("load", done, total, name))

    def show(self, progress: StartupProgress, label: str = "") -> None:
        """Show one message. Messages of a restarted engine come after the block and are not shown.

        label: begin of the line, which tells several models apart.
        """
        if self._is_closed:
            return
        done, total = progress.done, progress.total
        log = self._logs.setdefault(label, StartupLog(self._clock))
        left = _time_left(log.note(progress).seconds_left(self._clock()))
        name, label = label + progress.phase, label + label_of(progress.phase)
        if self._bars is not None:
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(label, left="")
            self._bars.update(self._tasks[name], completed=done, total=total, left=left)
            return
        if self._has_line(name, progress):
            amount = (
                f"{done // _MIB}/{total // _MIB} MiB"
                if progress.phase == _BYTES_PHASE and total > _MIB
                else f"{done}/{total}"
            )
            report(logging.INFO, f"{label}: {amount}{', ' + left if left else ''}")

    def _has_line(self, name: str, progress: StartupProgress) -> bool:
        """Return True for the begin of the phase `name`, in case it hangs, and once from its middle on if that took long."""
        if name not in self._shown:
            self._shown.add(name)
            self._begun_s[name] = self._clock()
            return progress.done < max(progress.total, 1)
        is_late = progress.total <= 2 * progress.done < 2 * progress.total
        if not is_late or self._clock() - self._begun_s.get(name, math.inf) < LONG_S:
            return False
        del self._begun_s[name]
        return True


def _time_left(seconds: float | None) -> str:
    return f"about {seconds:.0f} s left" if seconds is not None and seconds >= 0.5 else ""
