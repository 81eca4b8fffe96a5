"""How far the start is: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from jaxserve.ipc.messages import StartupProgress

_LINES_PER_PHASE = 4
_LABELS = {"model": "find model", "tokenizer": "load tokenizer", "load": "load weights", "compile": "compile programs"}


class StartupDisplay:
    """Shows `StartupProgress` on stderr, phase by phase. A context manager; closing leaves the bars as they are."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=Console(stderr=True)) if sys.stderr.isatty() else None
        self._tasks: dict[str, TaskID] = {}
        self._printed: dict[str, int] = {}

    def __enter__(self) -> StartupDisplay:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, progress: StartupProgress) -> None:
        """Show one message."""
        label = _LABELS.get(progress.phase, progress.phase)
        if self._bars is not None:
            if progress.phase not in self._tasks:
                self._tasks[progress.phase] = self._bars.add_task(label)
            self._bars.update(self._tasks[progress.phase], completed=progress.done, total=progress.total)
            return
        quarter = _LINES_PER_PHASE * progress.done // max(progress.total, 1)
        if self._printed.get(progress.phase, -1) < quarter:
            self._printed[progress.phase] = quarter
            print(f"{label}: {progress.done}/{progress.total}", file=sys.stderr, flush=True)
