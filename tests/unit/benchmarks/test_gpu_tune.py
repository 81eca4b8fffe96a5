"""The candidates of a tuning sweep over block sizes, and the selected one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
from jaxserve_kernels.paged_attention import tuning
from jaxserve_kernels.paged_attention.tuning import DecodeTuning, PrefillTuning

from benchmarks.gpu import tune
from benchmarks.gpu.ahead import Wanted
from benchmarks.gpu.attention_programs import (
    Heads,
    decode_program,
    prefill_program,
    public_decode,
    public_prefill,
)
from benchmarks.gpu.records import read_records
from benchmarks.gpu.tune import HEADS, RING_BYTES, best_changes, split_candidates, tile_candidates
from tests.unit.benchmarks.gpu_context import make_context

CURRENT = DecodeTuning(programs=132, min_split=256, waves=2, long_split=512, long_parts=256, tile=64, stages=2)


def test_candidates_hold_the_sizes_in_use_and_fit_the_shared_memory() -> None:
    for kernel, rings in (("decode", 2), ("prefill", 1)):
        for heads in HEADS:
            candidates = [each.tuning for each in tile_candidates(kernel, heads)]
            largest = max(each.tile * each.stages for each in candidates)
            assert largest * rings * 2 * heads.dim * heads.kv_dtype.itemsize <= RING_BYTES
            assert len(candidates) == len(set(candidates)) >= 4


def test_sizes_are_changed_one_at_a_time() -> None:
    candidates = split_candidates(CURRENT)
    assert candidates[0] == CURRENT and len(candidates) == len(set(candidates))
    for each in candidates[1:]:
        changed = [
            field
            for field in ("programs", "min_split", "waves", "tile", "stages")
            if getattr(each, field) != getattr(CURRENT, field)
        ]
        assert len(changed) == 1


def test_fastest_value_of_each_size_is_taken_over_all_cells() -> None:
    seconds = {
        CURRENT: [1.0, 1.0],
        replace(CURRENT, min_split=128): [0.5, 1.0],
        replace(CURRENT, min_split=512): [0.4, 3.0],  # better for one, worse for both
        replace(CURRENT, programs=264): [1.1, 1.0],
    }
    assert best_changes(CURRENT, seconds) == {"min_split": 128, "waves": 2, "programs": 132}


def test_nothing_changes_where_the_sizes_in_use_were_not_measured() -> None:
    seconds = {replace(CURRENT, min_split=128): [0.1]}
    assert best_changes(CURRENT, seconds) == {"min_split": 256, "waves": 2, "programs": 132}


SMALL = {
    "HEADS": (Heads(2, 1, 64, jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16)),),
    "TILES": (64,),
    "STAGES": (2, 3),
    "MIN_SPLITS": (128,),
    "PROGRAMS": (132,),
    "DECODE_CELL": (2, 64),
    "SPLIT_CELLS": ((1, 128), (2, 64)),
    "LONGEST": 128,
    "PROMPT": 64,
    "NUM_TOKENS": 512,
    "CELL_BUDGET_S": 0.0,
}


@pytest.mark.slow
def test_a_file_is_written_that_the_kernels_can_read_and_what_does_not_compile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference in the place of the kernels: everything but them."""

    def wanted(candidate: tune.Candidate) -> Wanted:
        heads, (batch, length), num_pages = candidate.heads, candidate.cell, candidate.heads.pool(512)[1]
        if candidate.tuning.stages == 3:
            return Wanted(lambda: 1 / 0, ())
        if isinstance(candidate.tuning, PrefillTuning):
            return prefill_program(heads, public_prefill(heads, "reference"), length, num_pages, "reference")
        return decode_program(heads, public_decode(heads, "reference"), batch, num_pages, 128, num_repeats=2)

    for name, value in SMALL.items():
        monkeypatch.setattr(tune, name, value)
    monkeypatch.setattr(tune.Candidate, "wanted", property(wanted))
    monkeypatch.setattr(tune, "why_no_kernels", lambda shape: None)
    tune.run(make_context(tmp_path, 60.0))
    written = json.loads((tmp_path / "tuning" / "h200.json").read_text())
    known = tuning.load("h200")
    assert {kernel: sizes.keys() for kernel, sizes in written.items()} == {
        kernel: sizes.keys() for kernel, sizes in known.items()
    }
    assert written["decode"]["tiles"] == {**known["decode"]["tiles"], "64/2": {"tile": 64, "stages": 2}}
    records = read_records(tmp_path / "records")
    assert [record for record in records if record.kind == "problem"] == []
    assert ["ZeroDivisionError" in record.text for record in records if record.kind == "note"] == [True, True]
    assert {record.name for record in records if record.kind == "figure"} == {
        "decode tiles",
        "prefill tiles",
        "decode splits",
    }
