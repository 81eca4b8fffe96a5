"""Findings of a part, one JSON line each: a part that is killed keeps the findings before that."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

Value = float | int | str | bool | None
Kind = Literal["check", "figure", "note", "problem", "expected", "begun", "done", "lost"]
FINDINGS: tuple[Kind, ...] = ("check", "figure", "note", "problem")
"""Kinds that belong to the results; the others say how far a part has come."""

MAX_TEXT = 400


@dataclass(frozen=True, slots=True)
class Record:
    """One finding.

    check    `passed` says whether a result was right; values hold the error and what was allowed
    figure   a row of the table `name`
    note     something a reader of the figures must know
    problem  something that should have been found and was not, and why
    expected an attempt that the part is going to make
    begun, done, lost
             an attempt that began, that ended, or that left the device unusable
    """

    kind: Kind
    name: str
    values: dict[str, Value] = field(default_factory=dict)
    text: str = ""
    passed: bool | None = None


class DeviceLostError(Exception):
    """An attempt left the device unusable for this process."""


class Recorder:
    """Writes records as they come, from any thread or process, and knows how long the part may still take."""

    def __init__(
        self,
        file: Path,
        deadline_s: float,
        *,
        settled: Collection[str] = (),
        is_device_well: Callable[[], bool] = lambda: True,
    ) -> None:
        """Create a recorder of one process.

        deadline_s: time of `time.monotonic()` at which the part should be over. settled: attempts that an earlier
        process of the part has made. is_device_well: called after an attempt that raised.
        """
        self._file = file
        self._deadline_s = deadline_s
        self._settled = frozenset(settled)
        self._is_device_well = is_device_well
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

    def expect(self, names: Iterable[str]) -> None:
        """Announce attempts: the results name those that the part does not reach."""
        for name in names:
            self._write(Record("expected", name))

    def attempt(self, name: str, work: Callable[[], object]) -> bool:
        """Do `work` unless time is up or it is settled; return True if it was done. What it raises becomes a problem.

        Raises DeviceLostError if the device is unusable afterwards: another process goes on with the other attempts.
        """
        if name in self._settled:
            return False
        if self.left_s <= 0:
            self.problem(name, "not begun: the part's time was up")
            return False
        self._write(Record("begun", name))
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            if not self._is_device_well():
                self._write(Record("lost", name, text=one_line(error)))
                raise DeviceLostError(name) from error
            self.problem(name, one_line(error))
            return False
        self._write(Record("done", name))
        return True

    def __reduce__(self) -> tuple[Callable[..., Recorder], tuple[Path, float]]:
        """For other processes: whole lines are appended to the same file, and all processes have the same clock."""
        return partial(Recorder, settled=self._settled), (self._file, self._deadline_s)

    def _write(self, record: Record) -> None:
        line = as_line(record)
        with self._lock, self._file.open("a", encoding="utf-8") as file:
            file.write(line)


def as_line(record: Record) -> str:
    """Return a record as a line of a part's file."""
    return json.dumps(dataclasses.asdict(record)) + "\n"


def read_records(file: Path) -> list[Record]:
    """All whole lines of a part's file, which may not exist and may end in a torn one."""
    records = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        try:
            records.append(Record(**json.loads(line)))
        except ValueError:
            break
    return records


def settled_names(records: Iterable[Record]) -> set[str]:
    """Return the attempts that ended, well or not."""
    return {record.name for record in records if record.kind in ("done", "problem")}


def unended_names(records: Sequence[Record]) -> list[str]:
    """Return the attempts that began and did not end, in the order of their beginnings."""
    settled = settled_names(records)
    return list(dict.fromkeys(each.name for each in records if each.kind == "begun" and each.name not in settled))


def one_line(error: BaseException) -> str:
    """Class and message without line ends."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_TEXT]
