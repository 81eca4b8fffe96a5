"""Lines of progress where there is no terminal."""

from __future__ import annotations

import pytest

from jaxserve.ipc.messages import StartupProgress
from jaxserve.runtime.startup_display import StartupDisplay


def test_a_long_phase_has_a_line_at_its_middle_that_says_how_long_it_may_still_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now_s = 0.0
    with StartupDisplay(lambda: now_s) as display:
        for done in range(9):
            display.show(StartupProgress("compile", done, 8))
            now_s += 3
    display.show(StartupProgress("load", 0, 8))  # of a later start
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "compile programs: 0/8",
        "compile programs: 4/8, about 12 s left",
    ]


def test_a_short_start_has_a_line_for_each_phase(capsys: pytest.CaptureFixture[str]) -> None:
    phases = {"model": 1, "tokenizer": 1, "load": 8, "compile": 9, "first_run": 9}
    now_s = 0.0
    with StartupDisplay(lambda: now_s) as display:
        for phase, total in phases.items():
            for done in range(total + 1):
                display.show(StartupProgress(phase, done, total))
                now_s += 0.5
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in lines] == [f"0/{total}" for total in phases.values()]


def test_phases_of_several_models_are_distinguished(capsys: pytest.CaptureFixture[str]) -> None:
    with StartupDisplay(lambda: 0.0) as display:
        for label in ("a: ", "b: "):
            display.show(StartupProgress("compile", 0, 3), label)
            display.show(StartupProgress("compile", 2, 3), label)
    assert capsys.readouterr().err == "a: compile programs: 0/3\nb: compile programs: 0/3\n"


def test_a_phase_of_one_unit_has_a_line_for_its_begin(capsys: pytest.CaptureFixture[str]) -> None:
    with StartupDisplay() as display:
        display.show(StartupProgress("tokenizer", 0, 1))
        display.show(StartupProgress("tokenizer", 1, 1))
    assert capsys.readouterr().err == "load tokenizer: 0/1\n"


def test_weights_are_counted_in_mebibytes(capsys: pytest.CaptureFixture[str]) -> None:
    StartupDisplay().show(StartupProgress("load", 0, 512 << 20))
    assert capsys.readouterr().err == "load weights: 0/512 MiB\n"
