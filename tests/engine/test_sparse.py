"""Sparse attention, and attention to compressed blocks, in the whole engine: what a query attends to depends on nothing but its own text.

Indexers choose 8 to 20 tokens there: every prompt and reply is longer. Blocks of 4 and of 6 tokens do not end where chunks of 7 or 16
tokens and pages of 16 do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs

from jaxserve.config import CacheConfig, Config, ModelConfig, ParallelConfig, TierConfig
from jaxserve.errors import ConfigError
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.runner.cache_sizes import with_cache_groups
from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import GoldenCheckpoint, golden_checkpoint

pytestmark = pytest.mark.slow
COMPRESSED = "deepseek_v4_tiny"
IN_CI = ("minimax_m3_tiny", "glm5_next_tiny", COMPRESSED)
"""Blocks of 4 tokens for each KV head, pools of 4 tokens beside recurrent states, and compressed blocks. `test_weight_formats.py` cuts and
resumes prompts of the others without an engine."""
NAMES = [
    *IN_CI,
    *(
        pytest.param(name, marks=pytest.mark.exhaustive)
        for name in (
            "deepseek_v32_tiny",
            "glm_moe_dsa_tiny",
            "mistral_large4_tiny",
            "qwen4_exp_tiny",
            "qwen4_exp_odd_tiny",
            "glm5_next_odd_tiny",
            "minimax_m3_odd_tiny",
        )
    ),
]
"""An indexer in every layer, layers that take what an earlier one has chosen, blocks of tokens for each KV head: of 4 tokens, and of
5, which cut pages; layers that share vectors; pools of 4 tokens and of 3 beside recurrent states; blocks of 4 tokens and of 5 whose keys are means, beside embeddings of several
tokens."""
RANKS = [
    "glm5_next_tiny",
    *(
        pytest.param(name, marks=pytest.mark.exhaustive)
        for name in (
            "mistral_large4_tiny",
            "deepseek_v32_tiny",
            "glm_moe_dsa_tiny",
            "minimax_m3_tiny",
            "glm5_next_odd_tiny",
            "minimax_m3_odd_tiny",
        )
    ),
]
"""Latent vectors beside keys of indexers, and pools of tokens beside states. `tests/models/test_parallel.py` computes one of each other kind on
data ranks."""


@pytest.fixture(scope="module", params=NAMES)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[GoldenCheckpoint, ModelEngine]]:
    """Up to 2 requests and 16 tokens a step. Begin with `restart`."""
    golden = golden_checkpoint(request.param)
    engine = ModelEngine(golden.path, max_num_seqs=2, max_num_batched_tokens=16, num_speculative_tokens=3)
    yield golden, engine
    engine.close()


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}], ids=str)
def test_tokens_equal_transformers_among_other_requests(
    served: tuple[GoldenCheckpoint, ModelEngine], options: dict[str, int]
) -> None:
    golden, engine = served
    engine.restart(**options)  # type: ignore[arg-type]
    mix = [request("a", golden.prompt_ids, max_tokens=64), request("b", [9, 8, 7], temperature=1.0, seed=3)]
    assert engine.run(mix)["a"].token_ids == golden.output_ids.tolist()
    assert engine.executor.compilations()["serving"] == 0


def test_right_and_wrong_drafts_change_no_token(served: tuple[GoldenCheckpoint, ModelEngine]) -> None:
    golden, engine = served
    engine.restart(num_speculative_tokens=3, max_burst_ms=0.0)
    tokens = golden.output_ids.tolist()
    predicted = [token ^ 1 if place % 16 == 9 else token for place, token in enumerate(tokens)]
    drafted = structs.replace(request("a", golden.prompt_ids, max_tokens=64), prediction_token_ids=predicted)
    assert engine.run([drafted, request("b", [9, 8, 7], temperature=1.0, seed=3)])["a"].token_ids == tokens
    assert engine.num_accepted_tokens > 10
    assert engine.num_draft_tokens > engine.num_accepted_tokens
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


@pytest.mark.parametrize("name", RANKS)
def test_data_ranks_divide_the_keys_of_indexers_and_generate_the_tokens_of_one_device(name: str) -> None:
    golden = golden_checkpoint(name)
    num_groups = 1 if name == "minimax_m3_odd_tiny" else 2  # of experts: it has five
    shape = {"tensor_parallel_size": 2, "data_parallel_size": 2, "expert_parallel_size": num_groups}
    engine = ModelEngine(golden.path, max_num_seqs=4, **shape)  # type: ignore[arg-type]
    prompts = dict.fromkeys("abc", golden.prompt_ids)
    others = [request("d", [9, 8, 7], temperature=1.0, seed=3), request("e", [5, 4], max_tokens=40)]
    results = engine.run([*(request(name, prompt, max_tokens=32) for name, prompt in prompts.items()), *others])
    for each in prompts:
        assert results[each].token_ids == golden.output_ids[:32].tolist()
    assert engine.executor.compilations()["serving"] == 0
    engine.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["glm_moe_dsa_tiny", "minimax_m3_tiny"])
def test_an_8_bit_cache_gives_every_chunk_and_every_prefix_the_same_tokens(name: str) -> None:
    golden = golden_checkpoint(name)
    engine = ModelEngine(golden.path, max_num_seqs=2, max_num_batched_tokens=64, kv_cache_dtype="fp8")
    found = []
    for options in ({}, {"max_num_batched_tokens": 7}, {"max_num_batched_tokens": 16}):
        engine.restart(**options)  # type: ignore[arg-type]
        found += [engine.run([request("a", golden.prompt_ids, max_tokens=32)])["a"].token_ids for _ in range(2)]
    assert all(each == found[0] for each in found)
    engine.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["glm_moe_dsa_tiny", "minimax_m3_tiny", COMPRESSED])
def test_a_prefix_from_host_memory_has_the_keys_of_indexers_and_what_makes_the_next_block(name: str) -> None:
    golden = golden_checkpoint(name)
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
    decoder = decoder_of(open_model(golden_checkpoint(COMPRESSED).path))
    parallel = ParallelConfig(data_parallel_size=settings.pop("data_parallel_size", 1))
    config = Config(model=ModelConfig(model="model"), cache=CacheConfig(**settings), parallel=parallel)
    with pytest.raises(ConfigError, match=message):
        with_cache_groups(config, decoder)
