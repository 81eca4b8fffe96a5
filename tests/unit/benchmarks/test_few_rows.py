"""The benchmark of matmuls of few rows."""

from __future__ import annotations

import re

import pytest
from jaxserve_kernels import native

from benchmarks.few_rows import FORMATS, main

pytestmark = pytest.mark.slow


def test_each_format_and_number_of_rows_has_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    if native.register() is None:
        pytest.skip("no native kernels")
    assert main(["--inputs", "64", "--rows", "1", "3", "--bytes", "1000000", "--runs", "1"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["inputs", "weights", "1", "rows", "3", "rows"]
    assert [line.split()[1] for line in lines] == list(FORMATS)
    assert all(len(re.findall(r"\d\.\d \(\d+\.\d\)", line)) == 2 for line in lines)


def test_without_native_kernels_one_line_says_how_to_build_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.few_rows.native.register", lambda: None)
    assert main([]) == 2
    assert "python -m jaxserve_kernels.native.build" in capsys.readouterr().err
