"""Progress of the start, with an estimate of the time left, and the report of its times.

The engine's part arrives as progress while it starts, and as one report when it is ready; the phases of this process
are measured here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from jaxserve.http.operations.schema import Loading, Restarting, Started, StartupPhase, StartupProgram
from jaxserve.ipc.messages import StartupProgress
from jaxserve.ipc.report import PhaseClock, PhaseSpan, StartupReport


@dataclass(frozen=True, slots=True)
class PhaseProgress:
    """One phase under way."""

    progress: StartupProgress
    started_s: float
    """Time of its first message."""

    @property
    def is_over(self) -> bool:
        return self.progress.done >= self.progress.total

    def seconds_left(self, now_s: float) -> float | None:
        """Return the time left at the pace so far; None before the first unit is done, and for hosts, which join at no pace."""
        done, total = self.progress.done, self.progress.total
        if self.is_over:
            return 0.0
        has_pace = done > 0 and self.progress.phase != "hosts"
        return (now_s - self.started_s) / done * (total - done) if has_pace else None


class StartupLog:
    """The start of one server, or of an engine after another, seen from one API process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phases: dict[str, PhaseProgress] = {}
        self._latest: str | None = None
        self._reply: type[Loading] = Loading
        self.own = PhaseClock()
        """Phases of this process."""

    def begin_again(self) -> None:
        """Forget the phases so far: another engine starts."""
        self._phases.clear()
        self._latest = None
        self._reply = Restarting
        self.own = PhaseClock()

    def note(self, progress: StartupProgress) -> PhaseProgress:
        """Record one message; return its phase as it is now."""
        known = self._phases.get(progress.phase)
        phase = PhaseProgress(progress, self._clock() if known is None else known.started_s)
        self._phases[progress.phase] = phase
        self._latest = progress.phase
        return phase

    def under_way(self) -> Loading:
        """Return the phase to wait for: of those that overlap, the one that will take longest."""
        now_s = self._clock()
        left = {name: phase.seconds_left(now_s) for name, phase in self._phases.items() if not phase.is_over}
        if left:
            name = max(left, key=lambda name: float("inf") if (seconds := left[name]) is None else seconds)
        elif self._latest is not None:
            name = self._latest
        else:
            return self._reply("start", 0, 1, None)
        progress, seconds = self._phases[name].progress, left.get(name)
        return self._reply(name, progress.done, progress.total, None if seconds is None else round(seconds, 1))

    def spans(self, engine: StartupReport) -> list[PhaseSpan]:
        """Return all phases in the order in which they began."""
        return sorted([*engine.phases, *self.own.spans], key=lambda span: span.start_s)


def startup_reply(spans: Sequence[PhaseSpan], engine: StartupReport) -> Started:
    """Return the whole report. Times are seconds since the first phase began."""
    begin_s = min((span.start_s for span in spans), default=0.0)
    return Started(
        start=kind_of_start(engine),
        total_seconds=round(total_seconds(spans), 3),
        phases=[
            StartupPhase(
                phase=span.phase,
                start_seconds=round(span.start_s - begin_s, 3),
                end_seconds=round(span.end_s - begin_s, 3),
                seconds=round(span.seconds, 3),
            )
            for span in spans
        ],
        programs=[
            StartupProgram(program.name, program.source, round(program.seconds, 3)) for program in engine.programs
        ],
    )


def startup_table(spans: Sequence[PhaseSpan], engine: StartupReport) -> list[str]:
    """Return the report as lines of text."""
    begin_s = min((span.start_s for span in spans), default=0.0)
    num_cached = sum(program.source in _CACHED for program in engine.programs)
    num_late = sum(program.source in _LATE for program in engine.programs)
    programs = f"; {num_cached} of {len(engine.programs)} programs from the cache" if engine.programs else ""
    programs += f", {num_late} follow beside requests" if num_late else ""
    width = max((len(label_of(span.phase)) for span in spans), default=0)
    return [
        f"{kind_of_start(engine)} start in {total_seconds(spans):.1f} s{programs} (its phases: /startup)",
        f"{'':<{width}}   from     to  seconds",
        *(
            f"{label_of(span.phase):<{width}} {span.start_s - begin_s:6.2f} {span.end_s - begin_s:6.2f} {span.seconds:8.2f}"
            for span in spans
        ),
    ]


def total_seconds(spans: Sequence[PhaseSpan]) -> float:
    """Return the time from the begin of the first to the end of the last: less than their sum, as they overlap."""
    return max((span.end_s for span in spans), default=0.0) - min((span.start_s for span in spans), default=0.0)


def kind_of_start(engine: StartupReport) -> str:
    """Return `cold` if no program came from the cache, `warm` if every one did, else `partly warm`."""
    are_cached = {program.source in _CACHED for program in engine.programs}
    if are_cached == {True}:
        return "warm"
    return "partly warm" if True in are_cached else "cold"


def label_of(phase: str) -> str:
    """Return a phase in words."""
    return _LABELS.get(phase, phase)


_CACHED: Final = frozenset({"cache", "cache_later"})
_LATE: Final = frozenset({"cache_later", "later"})
_LABELS = {
    "server": "start server",
    "model": "find model",
    "tokenizer": "load tokenizer",
    "engine": "start engine",
    "hosts": "wait for hosts",
    "open": "open model",
    "trial": "try kernels",
    "load": "load weights",
    "compile": "compile programs",
    "kv_cache": "clear KV cache",
    "first_run": "run programs once",
}
