"""What is tried out when block sizes are tuned, and which of it is taken."""

from __future__ import annotations

from dataclasses import replace

from jaxserve_kernels.paged_attention.tuning import DecodeTuning

from benchmarks.gpu.tune import HEADS, RING_BYTES, best_changes, split_candidates, tile_candidates

CURRENT = DecodeTuning(programs=132, min_split=256, splits=512, tile=64, stages=2)


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
            for field in ("programs", "min_split", "splits", "tile", "stages")
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
    assert best_changes(CURRENT, seconds) == {"min_split": 128, "splits": 512, "programs": 132}


def test_nothing_changes_where_the_sizes_in_use_were_not_measured() -> None:
    seconds = {replace(CURRENT, min_split=128): [0.1]}
    assert best_changes(CURRENT, seconds) == {"min_split": 256, "splits": 512, "programs": 132}
