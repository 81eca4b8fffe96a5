"""The oracle that devices are compared with, medians, and how numbers are shown."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from benchmarks.gpu import oracle
from benchmarks.gpu.device import WrongDeviceError, first_device
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.processes import Outcome
from benchmarks.gpu.records import Record
from benchmarks.gpu.report import as_markdown, shown
from benchmarks.gpu.timing import time_calls
from tests.unit.benchmarks.gpu_context import make_context


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.5, "1,234"), (0.51239, "0.512"), (12.345, "12.3"), (None, "-"), (7, "7"), (0.0, "0"), (3.2e-9, "3.2e-09")],
)
def test_three_digits_are_shown(value: float | None, text: str) -> None:
    assert shown(value) == text


def test_page_holds_tables_notes_and_what_is_missing() -> None:
    records = [
        Record("figure", "steps", {"batch": 1, "step_ms": 2.5}),
        Record("figure", "steps", {"batch": 8, "of_bound": 0.25}),
        Record("check", "sum", {"error": 0.5}, passed=False),
        Record("note", "", text="it was cold"),
        Record("problem", "prefill", text="no memory"),
    ]
    page = as_markdown({"seed": 3}, [Outcome(PARTS[0], "incomplete", 2.0, records)])
    assert "| batch | step ms | of bound |\n| --- | --- | --- |\n| 1 | 2.50 | - |\n| 8 | - | 0.250 |" in page
    assert "0 of 1 checks passed" in page and "| sum | 0.500 |" in page
    assert "- it was cold\n- **missing**: prefill: no memory" in page


def test_worst_vector_counts_and_nan_never_passes() -> None:
    expected = np.array([[3.0, 4.0], [0.0, 0.0], [100.0, 0.0]])
    assert oracle.vector_error(np.add(expected, [[0.0, 0.5], [0.0, 0.0], [0.0, 0.0]]), expected) == pytest.approx(0.1)
    assert oracle.vector_error(np.add(expected, [[0.0, 0.0], [0.0, 0.25], [0.0, 0.0]]), expected) == pytest.approx(0.25)
    assert oracle.vector_error(expected * np.nan, expected) == np.inf


def test_stored_numbers_are_rounded_and_limited_to_the_range_of_the_page() -> None:
    given = np.array([0.5, 1.5, -2.6, 5e3, -np.inf, np.nan])
    assert oracle.stored(given, np.dtype(np.int8)).tolist() == [0, 2, -3, 127, -128, 0]
    assert oracle.stored(given, np.dtype(ml_dtypes.float8_e4m3fn)).tolist() == [0.5, 1.5, -2.5, 448.0, -448.0, 0.0]


def test_timing_waits_for_the_last_call_of_a_group() -> None:
    calls: list[int] = []
    waits: list[int] = []
    timing = time_calls(lambda: calls.append(0) or len(calls), waits.append, budget_s=0.0)
    assert timing.num_samples == 3
    assert waits[-1] == len(calls)
    assert timing.least_s <= timing.median_s <= timing.most_s


def test_cpu_is_not_taken_for_the_gpu_that_was_asked_for(tmp_path: Path) -> None:
    context = make_context(tmp_path, platform="cuda")
    with pytest.raises(WrongDeviceError, match="--platform cuda"):
        first_device(context)
    assert first_device(dataclasses.replace(context, platform="cpu")).platform == "cpu"
