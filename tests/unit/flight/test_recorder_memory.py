"""The flight recorder counts the memory that its events take."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from jaxserve.flight.recorder import KeptResult
from jaxserve.scheduler.plan import StepResult
from tests.engine.rig import Rig, add, prompt


@pytest.mark.parametrize("num_rows", [4, 24])
@pytest.mark.parametrize("num_drafts", [0, 4])
def test_counted_bytes_are_those_that_events_take(num_rows: int, num_drafts: int) -> None:
    rig = Rig(
        recorded_steps=1000,
        num_blocks=1000,
        max_num_seqs=num_rows,
        max_num_batched_tokens=2 * num_rows,
        num_speculative_tokens=num_drafts,
        depth=1,
    )
    rig.send(*(add(f"r{i}", prompt(20, first=3 + i), max_tokens=60) for i in range(num_rows)))
    for _ in range(15):
        rig.step()
    assert rig.recorder is not None
    (segment,) = rig.recorder.segments
    num_events, num_bytes = len(segment.events), segment.num_bytes
    tracemalloc.start()
    try:
        for _ in range(25):
            rig.step()
        rig.plans.clear()
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
        del segment.events[num_events:]
        taken -= tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.8 < (segment.num_bytes - num_bytes) / taken < 1.25


def test_calls_that_are_forgotten_are_not_counted() -> None:
    rig = Rig(recorded_steps=1000)
    rig.run(add("a", prompt(5), max_tokens=3))
    assert rig.recorder is not None
    (segment,) = rig.recorder.segments
    before = len(segment.events), segment.num_bytes
    assert rig.step() is None
    assert (len(segment.events), segment.num_bytes) == before


def test_a_kept_result_lets_go_of_what_the_program_returned() -> None:
    packed = np.zeros((4, 1000), np.int32)
    kept = KeptResult.of(StepResult(packed[:1, :8], packed, packed, packed, 0.0, None))
    assert kept.token_ids.base is None
