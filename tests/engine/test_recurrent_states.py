"""A real (tiny) hybrid in the whole engine: its states follow its requests, and come back from snapshots."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from jaxserve.ipc.messages import AddRequest
from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import golden_checkpoint

pytestmark = [pytest.mark.slow]
NAME = "falcon_h1_tiny"
"""Attention and Mamba-2 in every layer."""


@pytest.fixture(scope="module")
def engine() -> Iterator[ModelEngine]:
    made = ModelEngine(golden_checkpoint(NAME).path, max_model_len=512, max_num_batched_tokens=96)
    yield made
    made.close()


def with_shared_stem() -> list[AddRequest]:
    rng = np.random.default_rng(0)
    stem = rng.integers(3, 200, 150)
    tails = [rng.integers(3, 200, 5 + 11 * number) for number in range(5)]
    return [request(str(i), np.concatenate([stem, tail]), max_tokens=30) for i, tail in enumerate(tails)]


def test_tokens_equal_transformers(engine: ModelEngine) -> None:
    golden = golden_checkpoint(NAME)
    engine.restart()
    assert engine.run([request("a", golden.prompt_ids, max_tokens=64)])["a"].token_ids == golden.output_ids.tolist()


def test_chunks_neighbours_and_preemption_change_no_token(engine: ModelEngine) -> None:
    messages = with_shared_stem()
    alone = []
    for message in messages:
        engine.restart()
        alone.append(engine.run([message])[message.request_id].token_ids)
    for options in ({}, {"max_num_batched_tokens": 17}, {"num_blocks": 26}, {"overlap": False}):
        engine.restart(**options)  # type: ignore[arg-type]
        together = engine.run(messages)
        assert [together[each.request_id].token_ids for each in messages] == alone, options
        assert engine.num_preemptions > 0 or "num_blocks" not in options


def test_prefix_hit_equals_a_cold_request_bit_for_bit(engine: ModelEngine) -> None:
    message = with_shared_stem()[3]
    scored = request("a", message.prompt_token_ids, num_top_logprobs=3)
    engine.restart(max_burst_ms=0.0)
    cold = engine.run([scored])["a"]
    engine.run([scored])  # leaves a snapshot where its pages end
    hit = engine.run([scored])["a"]
    assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, 128)
    assert hit.logprobs == cold.logprobs
