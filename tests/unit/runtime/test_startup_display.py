"""Lines of progress where there is no terminal."""

from __future__ import annotations

import pytest

from jaxserve.ipc.messages import StartupProgress
from jaxserve.runtime.startup_display import StartupDisplay


def test_a_line_for_each_half_says_how_long_it_may_still_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now_s = 0.0
    with StartupDisplay(lambda: now_s) as display:
        for done in range(9):
            display.show(StartupProgress("compile", done, 8))
            now_s += 2
    display.show(StartupProgress("load", 0, 8))  # of a later start
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "compile programs: 0/8",
        "compile programs: 4/8, about 8 s left",
        "compile programs: 8/8",
    ]


def test_a_phase_of_one_unit_has_a_line_for_its_begin(capsys: pytest.CaptureFixture[str]) -> None:
    with StartupDisplay() as display:
        display.show(StartupProgress("tokenizer", 0, 1))
        display.show(StartupProgress("tokenizer", 1, 1))
    assert capsys.readouterr().err == "load tokenizer: 0/1\n"


def test_weights_are_counted_in_mebibytes(capsys: pytest.CaptureFixture[str]) -> None:
    StartupDisplay().show(StartupProgress("load", 0, 512 << 20))
    assert capsys.readouterr().err == "load weights: 0/512 MiB\n"
