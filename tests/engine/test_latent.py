"""Latent attention in the whole engine: a request's tokens depend on nothing but the request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import golden_checkpoint

pytestmark = pytest.mark.slow
GOLDEN = golden_checkpoint("deepseek_v3_tiny")


@pytest.fixture(scope="module")
def latent_engine() -> Iterator[ModelEngine]:
    """DeepSeek-V3 with up to 2 requests and 16 tokens a step. Begin with `restart`."""
    engine = ModelEngine(GOLDEN.path, max_num_seqs=2, max_num_batched_tokens=16)
    yield engine
    engine.close()


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}, {"num_speculative_tokens": 3}], ids=str)
def test_tokens_equal_transformers_among_other_requests(latent_engine: ModelEngine, options: dict[str, int]) -> None:
    latent_engine.restart(**options)  # type: ignore[arg-type]
    mix = [request("a", GOLDEN.prompt_ids, max_tokens=64), request("b", [9, 8, 7], temperature=1.0, seed=3)]
    assert latent_engine.run(mix)["a"].token_ids == GOLDEN.output_ids.tolist()
    assert latent_engine.executor.compilations()["serving"] == 0


def test_a_prefix_hit_and_a_preempted_request_equal_a_cold_one(latent_engine: ModelEngine) -> None:
    latent_engine.restart()
    other = [*GOLDEN.prompt_ids[:36], 5, 6]
    latent_engine.run([request("a", other)])
    hit = latent_engine.run([request("b", GOLDEN.prompt_ids)])["b"]
    assert (hit.token_ids, hit.num_cached_tokens) == (GOLDEN.output_ids[:24].tolist(), 32)
    latent_engine.restart(num_blocks=8)
    mix = [request("c", GOLDEN.prompt_ids, max_tokens=40), request("d", list(range(5, 15)), max_tokens=60)]
    results = latent_engine.run(mix)
    assert latent_engine.num_preemptions > 0
    assert results["c"].token_ids == GOLDEN.output_ids[:40].tolist()


@pytest.mark.exhaustive
def test_data_ranks_divide_the_latent_vectors_and_generate_the_tokens_of_one_device() -> None:
    shape = {"tensor_parallel_size": 2, "data_parallel_size": 2, "expert_parallel_size": 2}
    engine = ModelEngine(GOLDEN.path, max_num_seqs=4, **shape)  # type: ignore[arg-type]
    prompts = dict.fromkeys("abc", GOLDEN.prompt_ids)
    others = [request("d", [9, 8, 7], temperature=1.0, seed=3), request("e", [5, 4], max_tokens=40)]
    results = engine.run([*(request(name, prompt, max_tokens=32) for name, prompt in prompts.items()), *others])
    for name in prompts:
        assert results[name].token_ids == GOLDEN.output_ids[:32].tolist()
    assert [engine.kv.pool.num_free_of(rank) for rank in range(2)] == [engine.kv.pool.num_usable_by_one] * 2
    assert engine.executor.compilations()["serving"] == 0
    engine.close()
