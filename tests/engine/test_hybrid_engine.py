"""Real (tiny) models with recurrent layers in an engine: the tokens are those of transformers, or of a request alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.engine.model_engine import ModelEngine, request
from tests.engine.test_speculation import check_drafts_change_nothing
from tests.models.goldens import golden_checkpoint

pytestmark = [pytest.mark.slow]
NUM_DRAFTS = 3
"""Drafted tokens of the tests that ask for drafts."""


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3_5_odd_tiny", "xla"),
        ("falcon_h1_odd_tiny", "native"),
        ("falcon_mamba_tiny", "native"),
        pytest.param(("kimi_linear_odd_tiny", "native"), marks=pytest.mark.exhaustive),
        pytest.param(("bailing_hybrid_odd_tiny", "native"), marks=pytest.mark.exhaustive),
        pytest.param(("lfm3_tiny", "native"), marks=pytest.mark.exhaustive),  # windows beside states
        pytest.param(("jamba_tiny", "xla"), marks=pytest.mark.exhaustive),
        pytest.param(("minimax_odd_tiny", "native"), marks=pytest.mark.exhaustive),  # states without windows
        pytest.param(("zaya_odd_tiny", "native"), marks=pytest.mark.exhaustive),  # keys of a window depend on states
    ],
)
def engine(request: Any) -> Iterator[tuple[str, ModelEngine]]:
    name, kernels = request.param
    made = ModelEngine(golden_checkpoint(name).path, cpu_kernels=kernels, num_speculative_tokens=NUM_DRAFTS)
    yield name, made
    made.executor.close()


def test_tokens_equal_transformers(engine: tuple[str, ModelEngine]) -> None:
    name, made = engine
    golden = golden_checkpoint(name)
    made.restart()
    assert made.run([request("a", golden.prompt_ids, max_tokens=64)])["a"].token_ids == golden.output_ids.tolist()


def test_chunks_neighbours_and_preemption_change_no_token(engine: tuple[str, ModelEngine]) -> None:
    name, made = engine
    golden, rng = golden_checkpoint(name), np.random.default_rng(0)
    prompts = [np.concatenate([golden.prompt_ids, rng.integers(3, 200, 1 + 9 * i)]) for i in range(4)]
    messages = [request(str(i), each, max_tokens=20) for i, each in enumerate(prompts)]
    alone = []
    for message in messages:
        made.restart()
        alone.append(made.run([message])[message.request_id].token_ids)
    for options in ({}, {"max_num_batched_tokens": 7}, {"num_blocks": 12}, {"overlap": False}):
        made.restart(**options)
        together = made.run(messages)
        assert [together[each.request_id].token_ids for each in messages] == alone, options


def test_a_request_that_begins_at_a_snapshot_gives_the_tokens_of_a_cold_one(engine: tuple[str, ModelEngine]) -> None:
    made, rng = engine[1], np.random.default_rng(1)
    stem = rng.integers(3, 300, 70)
    messages = [request(str(i), np.concatenate([stem, rng.integers(3, 300, 9)]), max_tokens=20) for i in range(3)]
    cold = []
    for message in messages:
        made.restart()
        cold.append(made.run([message])[message.request_id].token_ids)
    made.restart()
    found = [made.run([message])[message.request_id] for message in messages]
    assert [each.token_ids for each in found] == cold
    assert found[2].num_cached_tokens >= 64


def test_a_prefix_hit_equals_a_cold_request_bit_for_bit(engine: tuple[str, ModelEngine]) -> None:
    made, prompt = engine[1], np.random.default_rng(2).integers(3, 300, 90)
    scored = request("a", prompt, max_tokens=20, num_top_logprobs=3)
    made.restart(max_burst_ms=0.0)
    cold = made.run([scored])["a"]
    made.run([scored])  # leaves a snapshot where its pages end, if there is none
    hit = made.run([scored])["a"]
    assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, 64)
    assert hit.logprobs == cold.logprobs


@pytest.mark.usefixtures("speculates")
@pytest.mark.exhaustive
def test_drafts_of_prompt_lookup_change_no_token(engine: tuple[str, ModelEngine]) -> None:
    """Drafts are a chunk, after which states go back to the last accepted token; most, some or none of a draft is right."""
    made = engine[1]
    check_drafts_change_nothing(made, NUM_DRAFTS, num_cached=0, predicts=True)
    assert 0.3 < made.num_accepted_tokens / made.num_draft_tokens < 0.95
    assert made.executor.compilations()["serving"] == 0
