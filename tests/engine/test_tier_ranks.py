"""Data ranks of real (tiny) models with KV tiers: each rank's pages and snapshots leave the devices, and come back to the rank that
the request starts on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from jaxserve.config import TierConfig
from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import golden_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]  # real models
NUM_RANKS = 2
STEMS = [np.random.default_rng(seed).integers(3, 300, 70) for seed in range(4)]


@pytest.fixture(
    scope="module",
    params=[
        ("mistral_sliding_tiny", {"kv_cache_memory": 10 << 15}),
        pytest.param(
            ("deepseek_v3_tiny", {"kv_cache_memory": 1 << 16, "tensor_parallel_size": 2}), marks=pytest.mark.exhaustive
        ),
        ("qwen3_next_tiny", {"kv_cache_memory": 1 << 19, "tensor_parallel_size": 2}),
        pytest.param(("falcon_h1_odd_tiny", {"kv_cache_memory": 1 << 20}), marks=pytest.mark.exhaustive),
    ],
    ids=lambda param: param[0],
)
def engine(request: pytest.FixtureRequest) -> Iterator[ModelEngine]:
    """Keys and values, latent vectors, gated delta nets whose heads two devices of a rank share, and Mamba-2."""
    name, options = request.param
    tiers = TierConfig(kv_offload_memory=16 << 20, kv_fetch="always", kv_fetch_timeout=60.0)
    engine = ModelEngine(golden_checkpoint(name).path, data_parallel_size=NUM_RANKS, tiers=tiers, **options)
    yield engine
    engine.close()


def test_prefix_from_a_tier_has_the_bits_of_a_hit_on_the_device(engine: ModelEngine) -> None:
    engine.restart(max_burst_ms=0.0)
    assert engine.tiers is not None
    messages = [request(str(number), stem, max_tokens=9, num_top_logprobs=3) for number, stem in enumerate(STEMS[:2])]
    for _ in range(2):  # the second one leaves the snapshot that a hit begins at
        engine.run(messages)
    device = [engine.run([item])[item.request_id] for item in messages]
    forget(engine)
    tier = [engine.run([item])[item.request_id] for item in messages]
    for found, hit in zip(device, tier, strict=True):
        assert found.num_cached_tokens == hit.num_cached_tokens == 64
        assert (hit.token_ids, hit.logprobs) == (found.token_ids, found.logprobs)
    assert engine.executor.compilations()["serving"] == 0
    engine.tiers.close()


def test_prefixes_that_return_together_are_divided_over_the_ranks(engine: ModelEngine) -> None:
    engine.restart()
    assert engine.tiers is not None
    messages = [request(str(number), stem, max_tokens=9) for number, stem in enumerate(STEMS[:2])]
    cold = [engine.run([item])[item.request_id].token_ids for item in messages]
    for item in messages:  # again, for its snapshot
        engine.run([item])
    forget(engine)
    found = engine.run(messages)
    assert [found[item.request_id].num_cached_tokens for item in messages] == [64, 64]
    assert [found[item.request_id].token_ids for item in messages] == cold
    ranks = [{rank for rank in range(NUM_RANKS) if cached_pages(engine, stem, rank)} for stem in STEMS[:2]]
    assert sorted(map(tuple, ranks)) == [(0,), (1,)]
    engine.tiers.close()


def forget(engine: ModelEngine) -> None:
    """Evict everything from the devices, once it is copied."""
    assert engine.tiers is not None
    engine.tiers.settle()
    engine.kv.reset_prefix_cache()
    assert not any(cached_pages(engine, stem, rank) for stem in STEMS for rank in range(NUM_RANKS))


def cached_pages(engine: ModelEngine, stem: np.ndarray, rank: int) -> int:
    """Return how many pages of a stem a rank has."""
    chain, tokens = engine.kv.new_table(None).chain, stem.astype(np.int32)
    return sum(engine.kv.pool.find(chain.hash(index, tokens), rank) is not None for index in range(4))


def test_pages_move_among_requests_that_run_on_both_ranks(engine: ModelEngine) -> None:
    """The pool of a rank holds about one of the requests, so that most are preempted or evicted."""
    rng = np.random.default_rng(3)
    messages = [request(f"r{i}", np.concatenate([STEMS[i % 4], rng.integers(3, 300, 5)])) for i in range(12)]
    engine.restart()
    assert engine.tiers is not None
    alone = {item.request_id: engine.run([item])[item.request_id].token_ids for item in messages}
    engine.tiers.close()
    for overlap in (True, False):
        engine.restart(overlap=overlap)
        assert engine.tiers is not None
        for start in (0, 4, 8, 4, 0):
            results = engine.run(messages[start : start + 4])
            for item in messages[start : start + 4]:
                assert results[item.request_id].token_ids == alone[item.request_id]
            engine.tiers.settle()
        assert engine.num_fetched_pages
        engine.tiers.close()
