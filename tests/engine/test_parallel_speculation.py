"""Drafts change no token of a model that several devices share: they share the draft model or the MTP layer alike, and the states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.engine.model_engine import ModelEngine, request
from tests.engine.test_mtp import drafted
from tests.engine.test_speculation import check_drafts_change_nothing
from tests.models.goldens import MTPGolden, golden_checkpoint, mtp_golden

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("speculates"), pytest.mark.exhaustive]  # real models
NUM_DRAFTS = 3


def made(tensor_parallel_size: int = 2, **options: Any) -> ModelEngine:
    return ModelEngine(num_speculative_tokens=NUM_DRAFTS, tensor_parallel_size=tensor_parallel_size, **options)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("deepseek_v3", {"expert_parallel_size": 2}), marks=pytest.mark.exhaustive),
        ("qwen3_next", {"data_parallel_size": 2}),
        pytest.param(
            ("deepseek_v3", {"tensor_parallel_size": 1, "data_parallel_size": 2}), marks=pytest.mark.exhaustive
        ),
    ],
    ids=str,
)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[MTPGolden, ModelEngine]]:
    """Latent attention with experts of their own on two devices, states whose heads two devices of each data rank share, and latent
    attention on two data ranks."""
    name, devices = request.param
    golden = mtp_golden(name)
    engine = made(path=golden.path, speculative_method="mtp", **devices)
    yield golden, engine
    engine.close()


def test_tokens_and_log_probabilities_are_those_without_an_mtp_layer(served: tuple[MTPGolden, ModelEngine]) -> None:
    golden, engine = served
    has_states = golden.path.name == "qwen3_next"  # prompts as short as these have no snapshots
    has_ranks = engine.kv.pool.num_ranks > 1  # the rank with the prompt's pages may be full
    check_drafts_change_nothing(engine, NUM_DRAFTS, num_cached=0 if has_states or has_ranks else 32)
    assert engine.executor.compilations()["serving"] == 0


def test_drafts_are_the_tokens_that_transformers_predicts(served: tuple[MTPGolden, ModelEngine]) -> None:
    golden, engine = served
    engine.restart(num_speculative_tokens=NUM_DRAFTS)
    for _ in range(2):  # the second time, the prompt may be found in the prefix cache
        assert golden.draft_ids.tolist() in drafted(engine, golden, [])


def test_a_request_that_begins_at_a_snapshot_gives_the_tokens_of_a_cold_one(
    served: tuple[MTPGolden, ModelEngine],
) -> None:
    """Each device keeps and finds its heads of a snapshot."""
    engine, prompt = served[1], np.random.default_rng(2).integers(3, 300, 90)
    message = request("a", prompt, max_tokens=20)
    engine.restart(max_burst_ms=0.0)
    found = [engine.run([message])["a"] for _ in range(3)]  # the first two may leave snapshots
    assert (found[0].num_cached_tokens, found[2].num_cached_tokens >= 64) == (0, True)
    assert [each.token_ids for each in found] == 3 * [found[0].token_ids]


def test_drafts_of_prompt_lookup_change_no_token_of_a_model_with_states() -> None:
    """Two devices share the heads of a gated delta net and their states, which go back together."""
    engine = made(path=golden_checkpoint("qwen3_5_tiny").path)
    check_drafts_change_nothing(engine, NUM_DRAFTS, num_cached=0, predicts=True)
    assert 0.3 < engine.num_accepted_tokens / engine.num_draft_tokens < 0.95
    engine.close()


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    """On two data ranks of two devices. One rank finds prompts in the prefix cache in the test of an MTP layer, and so does one device
    in tests/engine/test_speculation.py."""
    golden = golden_checkpoint("mistral_sliding_tiny")
    engine = made(path=golden.path, draft_model=golden.path, data_parallel_size=2)
    check_drafts_change_nothing(engine, NUM_DRAFTS, num_cached=0)
    assert engine.num_accepted_tokens > 0.5 * engine.num_draft_tokens
    engine.close()
