"""Data ranks of real (tiny) models with recurrent layers: each has the states and snapshots of its own requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.engine.model_engine import ModelEngine, request
from tests.engine.test_speculation import check_drafts_change_nothing
from tests.models.goldens import GoldenCheckpoint, golden_checkpoint

pytestmark = pytest.mark.slow  # real models
NUM_DRAFTS = 3
NUM_RANKS = 2


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3_next_tiny", {"tensor_parallel_size": 2, "expert_parallel_size": 2}),
        pytest.param(("falcon_h1_odd_tiny", {}), marks=pytest.mark.exhaustive),
        pytest.param(("zaya_tiny", {"tensor_parallel_size": 2}), marks=pytest.mark.exhaustive),
        pytest.param(("mamba_odd_tiny", {}), marks=pytest.mark.exhaustive),
    ],
    ids=lambda param: param[0],
)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[GoldenCheckpoint, ModelEngine]]:
    """Gated delta nets on four devices, which also share their heads, and Mamba-2 on two."""
    name, devices = request.param
    golden = golden_checkpoint(name)
    engine = ModelEngine(golden.path, data_parallel_size=NUM_RANKS, num_speculative_tokens=NUM_DRAFTS, **devices)
    yield golden, engine
    engine.close()


def test_tokens_equal_transformers_on_every_rank(served: tuple[GoldenCheckpoint, ModelEngine]) -> None:
    golden, engine = served
    for options in ({}, {"overlap": False, "max_num_batched_tokens": 7}, {"num_blocks": 20}):
        engine.restart(**options)  # type: ignore[arg-type]
        same = [request(name, golden.prompt_ids, max_tokens=40) for name in "abc"]
        others = [request("d", [9, 8, 7], temperature=1.0, seed=3), request("e", [5, 4], max_tokens=40)]
        results = engine.run([*same, *others])
        for item in same:
            assert results[item.request_id].token_ids == golden.output_ids[:40].tolist(), options
    assert engine.num_preemptions > 0, "nine pages of a rank hold no two of the requests"
    check_all_is_free(engine)
    assert engine.executor.compilations()["serving"] == 0


def test_a_request_begins_at_a_snapshot_of_its_rank(served: tuple[GoldenCheckpoint, ModelEngine]) -> None:
    """Two prefixes, one on each rank: their requests find them, and give the tokens of cold ones."""
    engine, random = served[1], np.random.default_rng(1)
    stems = [random.integers(3, 300, 70) for _ in range(NUM_RANKS)]
    messages = [
        request(f"{rank} {number}", np.concatenate([stem, random.integers(3, 300, 9)]))
        for number in range(3)
        for rank, stem in enumerate(stems)
    ]
    cold = []
    for message in messages:
        engine.restart()
        cold.append(engine.run([message])[message.request_id].token_ids)
    engine.restart()
    found: dict[str, Any] = {}
    for start in range(0, len(messages), NUM_RANKS):
        found |= engine.run(messages[start : start + NUM_RANKS])
    assert [found[message.request_id].token_ids for message in messages] == cold
    assert [found[f"{rank} 2"].num_cached_tokens for rank in range(NUM_RANKS)] == [64] * NUM_RANKS
    assert all(len(states.snapshots) for states in engine.kv.groups.states)
    check_all_is_free(engine)


@pytest.mark.usefixtures("speculates")
@pytest.mark.exhaustive
def test_drafts_of_prompt_lookup_change_no_token(served: tuple[GoldenCheckpoint, ModelEngine]) -> None:
    check_drafts_change_nothing(served[1], NUM_DRAFTS, num_cached=0, predicts=True)
    check_all_is_free(served[1])


def check_all_is_free(engine: ModelEngine) -> None:
    """Check that no rank has lost a page or a state slot."""
    size = engine.executor.model_info.num_state_slots // NUM_RANKS
    assert [states.num_free for states in engine.kv.groups.states] == [size - 1] * NUM_RANKS
    assert [engine.kv.pool.num_free_of(rank) for rank in range(NUM_RANKS)] == [engine.kv.pool.num_usable_by_one] * 2
