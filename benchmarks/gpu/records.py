"""Findings of a part, one JSON line each: a part that is killed keeps the findings before that."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Value = float | int | str | bool | None
Kind = Literal["check", "figure", "note", "problem"]

MAX_TEXT = 400


@dataclass(frozen=True, slots=True)
class Record:
    """One finding.

    check    `passed` says whether a result was right; values hold the error and what was allowed
    figure   a row of the table `name`
    note     something a reader of the figures must know
    problem  something that should have been found and was not, and why
    """

    kind: Kind
    name: str
    values: dict[str, Value] = field(default_factory=dict)
    text: str = ""
    passed: bool | None = None


class Recorder:
    """Writes records as they come, from any thread or process, and knows how long the part may still take."""

    def __init__(self, file: Path, deadline_s: float) -> None:
        """`deadline_s`: of `time.monotonic()`, when the part ought to be over."""
        self._file = file
        self._deadline_s = deadline_s
        self._lock = threading.Lock()

    @property
    def left_s(self) -> float:
        return self._deadline_s - time.monotonic()

    def check(self, name: str, *, passed: bool, **values: Value) -> None:
        self._write(Record("check", name, values, passed=passed))

    def figure(self, table: str, **values: Value) -> None:
        self._write(Record("figure", table, values))

    def note(self, text: str) -> None:
        self._write(Record("note", "", text=text))

    def problem(self, name: str, text: str) -> None:
        self._write(Record("problem", name, text=text[:MAX_TEXT]))

    def attempt(self, name: str, work: Callable[[], None]) -> bool:
        """Do `work` unless time is up, and say whether it was done; what it raises becomes a problem."""
        if self.left_s <= 0:
            self.problem(name, "not begun: the part's time was up")
            return False
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            self.problem(name, one_line(error))
            return False
        return True

    def __reduce__(self) -> tuple[type[Recorder], tuple[Path, float]]:
        """For other processes: whole lines are appended to the same file, and all processes have the same clock."""
        return Recorder, (self._file, self._deadline_s)

    def _write(self, record: Record) -> None:
        line = json.dumps(dataclasses.asdict(record))
        with self._lock, self._file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_records(file: Path) -> list[Record]:
    """All whole lines of a part's file, which may not exist and may end in a torn one."""
    records = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        try:
            records.append(Record(**json.loads(line)))
        except ValueError:
            break
    return records


def one_line(error: BaseException) -> str:
    """Class and message without line ends."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_TEXT]
