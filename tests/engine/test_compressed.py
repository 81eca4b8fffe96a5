"""Attention to compressed blocks in the whole engine: what a query attends to depends on nothing but its own text.

Blocks of 4 and of 6 tokens do not end where chunks of 7 or 16 tokens and pages of 16 do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.config import CacheConfig, Config, ModelConfig, ParallelConfig, TierConfig
from jaxserve.errors import ConfigError
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.runner.cache_sizes import with_cache_groups
from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import GoldenCheckpoint, golden_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[GoldenCheckpoint, ModelEngine]]:
    """Up to 2 requests and 16 tokens a step. Begin with `restart`."""
    golden = golden_checkpoint("deepseek_v4_tiny")
    engine = ModelEngine(golden.path, max_num_seqs=2, max_num_batched_tokens=16)
    yield golden, engine
    engine.close()


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}, {"num_speculative_tokens": 3}], ids=str)
def test_tokens_equal_transformers_among_other_requests(
    served: tuple[GoldenCheckpoint, ModelEngine], options: dict[str, int]
) -> None:
    golden, engine = served
    engine.restart(**options)  # type: ignore[arg-type]
    mix = [request("a", golden.prompt_ids, max_tokens=64), request("b", [9, 8, 7], temperature=1.0, seed=3)]
    assert engine.run(mix)["a"].token_ids == golden.output_ids.tolist()
    assert engine.executor.compilations()["serving"] == 0


def test_a_prefix_hit_inside_a_block_and_a_preempted_request_equal_a_cold_one(
    served: tuple[GoldenCheckpoint, ModelEngine],
) -> None:
    golden, engine = served
    engine.restart()
    engine.run([request("a", [*golden.prompt_ids[:36], 5, 6])])
    hit = engine.run([request("b", golden.prompt_ids)])["b"]
    assert (hit.token_ids, hit.num_cached_tokens) == (golden.output_ids[:24].tolist(), 32)
    engine.restart(num_blocks=8)
    mix = [request("c", golden.prompt_ids, max_tokens=40), request("d", list(range(5, 15)), max_tokens=60)]
    results = engine.run(mix)
    assert engine.num_preemptions > 0
    assert results["c"].token_ids == golden.output_ids[:40].tolist()


@pytest.mark.exhaustive
def test_a_prefix_from_host_memory_has_the_vectors_of_blocks_and_what_makes_the_next() -> None:
    golden = golden_checkpoint("deepseek_v4_tiny")
    tiers = TierConfig(kv_offload_memory=16 << 20, kv_fetch="always", kv_fetch_timeout=60.0)
    engine = ModelEngine(golden.path, tiers=tiers, max_num_seqs=2, max_num_batched_tokens=16)
    engine.restart()
    assert engine.tiers is not None
    scored = request("a", golden.prompt_ids, max_tokens=20, num_top_logprobs=3)
    cold = engine.run([scored])["a"]
    engine.tiers.settle()
    engine.kv.reset_prefix_cache()
    engine.run([request("b", golden.prompt_ids[::-1], max_tokens=20)])  # takes the pages of the first
    hit = engine.run([scored])["a"]
    assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, (len(golden.prompt_ids) - 1) // 16 * 16)
    assert (hit.token_ids, hit.logprobs) == (cold.token_ids, cold.logprobs)
    assert cold.token_ids == golden.output_ids[:20].tolist()
    assert engine.executor.compilations()["serving"] == 0
    engine.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_parallel_size": 2}, "--data-parallel-size 2: not with attention to compressed blocks"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8: not with attention to compressed blocks"),
        ({"block_size": 10}, "--block-size 10: a multiple of 4"),
    ],
    ids=str,
)
def test_settings_that_blocks_do_not_take_are_refused(settings: dict[str, Any], message: str) -> None:
    decoder = decoder_of(open_model(golden_checkpoint("deepseek_v4_tiny").path))
    parallel = ParallelConfig(data_parallel_size=settings.pop("data_parallel_size", 1))
    config = Config(model=ModelConfig(model="model"), cache=CacheConfig(**settings), parallel=parallel)
    with pytest.raises(ConfigError, match=message):
        with_cache_groups(config, decoder)
