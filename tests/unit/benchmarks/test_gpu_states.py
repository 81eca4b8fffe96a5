"""The part of the GPU check that measures recurrent states, on a CPU at tiny sizes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.gpu import states
from benchmarks.gpu.context import Context
from benchmarks.gpu.records import Recorder, read_records


@pytest.mark.slow
def test_decode_steps_and_both_forms_of_prompts_are_measured(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "records", time.monotonic() + 600)
    states.run(
        Context(
            platform="cpu",
            is_quick=True,
            seed=0,
            bounds=None,
            attention_backend="auto",
            folder=tmp_path,
            results=tmp_path,
            recorder=recorder,
        )
    )
    figures = [record.values for record in read_records(tmp_path / "records") if record.kind == "figure"]
    forms = [(row["tokens"], row["form"], row["backend"]) for row in figures]
    assert forms == [(1, "decode", "reference"), (64, "chunks", "reference"), (64, "tokens in turn", "reference")]
