"""Snapshots of real (tiny) models with recurrent states leave the device and come back: a hit from a tier equals a cold request."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from jaxserve.config import TierConfig
from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import golden_checkpoint

pytestmark = pytest.mark.slow  # real models
PROMPT = np.random.default_rng(2).integers(3, 300, 90)
MODELS = {
    "gated delta net on two devices": ("qwen3_next_tiny", {"tensor_parallel_size": 2}),
    "Mamba-2 beside attention, native kernels": ("falcon_h1_odd_tiny", {"cpu_kernels": "native"}),
}
MORE_MODELS = {
    "selective scans without attention": ("mamba_tiny", {"cpu_kernels": "native"}),
    "selective scans beside attention": ("jamba_odd_tiny", {}),
    "gated delta net": ("qwen3_5_odd_tiny", {}),
    "convolved queries and keys": ("zaya_tiny", {"kv_cache_dtype": "int8"}),
    "Mamba-2": ("granitemoehybrid_tiny", {}),
    "Mamba-2 with int8 keys and values": ("nemotron_h_tiny", {"kv_cache_dtype": "int8"}),
    "short convolution": ("lfm2_tiny", {}),
    "last tokens and last inputs": ("qwen4_exp_tiny", {}),
    "beside the pages of a draft model": (
        "qwen3_5_odd_tiny",
        {"draft_model": golden_checkpoint("smollm2_tiny").path, "num_speculative_tokens": 3},
    ),
}


@pytest.fixture(
    scope="module",
    params=[*MODELS.values(), *(pytest.param(each, marks=pytest.mark.exhaustive) for each in MORE_MODELS.values())],
    ids=[*MODELS, *MORE_MODELS],
)
def engine(request: pytest.FixtureRequest) -> Iterator[ModelEngine]:
    name, options = request.param
    tiers = TierConfig(kv_offload_memory=16 << 20, kv_fetch="always", kv_fetch_timeout=60.0)
    engine = ModelEngine(golden_checkpoint(name).path, tiers=tiers, **options)
    yield engine
    engine.close()


def slots(engine: ModelEngine) -> list[bytes]:
    """Return the snapshots of the prompt as they are on the device."""
    assert engine.executor.snapshots is not None
    chain = engine.kv.new_table(None).chain
    ends = range(32, len(PROMPT), 32)
    names = [chain.hash(end // engine.kv.block_size - 1, PROMPT.astype(np.int32)) for end in ends]
    found = [states.snapshots.get(name) for name in names for states in engine.kv.groups.states]
    taken = engine.executor.snapshots.read([slot for slot in found if slot is not None]).pages()  # type: ignore[misc]
    return [b"".join(block.tobytes() for block in states) for states in taken]


def test_prefix_from_a_tier_equals_a_cold_request_bit_for_bit(engine: ModelEngine) -> None:
    engine.restart(max_burst_ms=0.0)
    assert engine.tiers is not None
    scored = request("a", PROMPT, max_tokens=20, num_top_logprobs=3)
    cold = engine.run([scored])["a"]
    engine.run([scored])  # leaves a snapshot where its pages end
    before = slots(engine)
    assert len(set(before)) == len(before) > 0
    engine.tiers.settle()
    engine.kv.reset_prefix_cache()
    assert slots(engine) == []

    other = engine.run([request("other", PROMPT[::-1], max_tokens=20)])["other"]  # takes the slots of the first
    hit = engine.run([scored])["a"]
    assert (cold.num_cached_tokens, other.num_cached_tokens, hit.num_cached_tokens) == (0, 0, 64)
    assert hit.token_ids == cold.token_ids != other.token_ids
    assert hit.logprobs == cold.logprobs
    assert slots(engine)[-1] == before[-1]
    assert engine.executor.compilations()["serving"] == 0
    engine.tiers.close()


def test_snapshots_move_among_requests_that_run(engine: ModelEngine) -> None:
    """Pages and snapshots are saved and restored while other requests decode and give way, in a pool that holds two of them."""
    rng = np.random.default_rng(3)
    stems = [PROMPT[:66], PROMPT[10:76], PROMPT[20:86]]
    messages = [request(f"r{i}", np.concatenate([stems[i % 3], rng.integers(3, 300, 5)])) for i in range(9)]
    engine.restart()
    alone = {item.request_id: engine.run([item])[item.request_id].token_ids for item in messages}
    engine.tiers.close()  # type: ignore[union-attr]
    for overlap in (True, False):
        engine.restart(num_blocks=16, num_state_slots=6, overlap=overlap)
        assert engine.tiers is not None
        for group in (messages[:3], messages[3:6], messages[6:]):
            results = engine.run(group)
            for item in group:
                assert results[item.request_id].token_ids == alone[item.request_id]
            engine.tiers.settle()
        assert engine.num_fetched_snapshots
        engine.tiers.close()
    assert engine.executor.compilations()["serving"] == 0
