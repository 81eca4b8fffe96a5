"""Spans of a start on the clock that all processes share."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

import pytest

from jaxserve.ipc import report
from jaxserve.ipc.report import PhaseClock, process_start_s


def test_a_phase_that_fails_leaves_no_span() -> None:
    clock = PhaseClock()
    with clock.phase("good"):
        pass
    with contextlib.suppress(ValueError), clock.phase("bad"):
        raise ValueError
    (span,) = clock.take()
    assert (span.phase, span.seconds >= 0, clock.spans) == ("good", True, [])


def test_start_of_a_process_is_known() -> None:
    before_s = time.monotonic()
    script = "from jaxserve.ipc.report import process_start_s; print(process_start_s())"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True).stdout
    assert before_s - 0.02 <= float(output) <= time.monotonic()


def test_unknown_start_of_a_process_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(report, "open", refuse, raising=False)  # for that module alone
    before_s = time.monotonic()
    assert before_s <= process_start_s() <= time.monotonic()
