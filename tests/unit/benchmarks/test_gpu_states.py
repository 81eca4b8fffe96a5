"""The part of the GPU check that measures recurrent states, on a CPU at tiny sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import states
from benchmarks.gpu.records import read_records
from tests.unit.benchmarks.gpu_context import make_context


@pytest.mark.slow
def test_decode_steps_and_both_forms_of_prompts_are_measured(tmp_path: Path) -> None:
    states.run(make_context(tmp_path))
    figures = [record.values for record in read_records(tmp_path / "records") if record.kind == "figure"]
    forms = [(row["tokens"], row["form"], row["backend"]) for row in figures]
    assert forms == [(1, "decode", "reference"), (64, "chunks", "reference"), (64, "tokens in turn", "reference")]
