"""Real (tiny) models whose sliding-window layers keep only the window's pages: the tokens are those of all pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import GoldenCheckpoint, golden_checkpoint

pytestmark = [pytest.mark.slow]
CASES = (
    ("gemma2_tiny", "xla"),
    ("gemma4_tiny", "native"),  # layers that read other layers' pages, two head dims, embeddings of each layer
)
MORE_CASES = (
    ("gemma3n_tiny", "native"),  # residual streams, sparse activations, layers that read other layers' pages
    ("gemma4_moe_odd_tiny", "xla"),  # head dims 40 and 72, keys that are values, experts beside the dense block
    ("llama4_odd_tiny", "native"),  # chunks of 13 tokens, experts whose inputs are scaled in some layers
)
"""Models of which about half of the layers or more have a window or chunks of 8 tokens."""
CHUNKS = {"llama4_odd_tiny": 13}


@pytest.fixture(
    scope="module",
    params=[*CASES, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in MORE_CASES)],
    ids="-".join,
)
def case(request: Any) -> Iterator[tuple[GoldenCheckpoint, ModelEngine]]:
    name, kernels = request.param
    made = ModelEngine(golden_checkpoint(name).path, cpu_kernels=kernels)
    yield golden_checkpoint(name), made
    made.executor.close()


def test_tokens_equal_transformers_while_pages_are_freed(case: tuple[GoldenCheckpoint, ModelEngine]) -> None:
    golden, engine = case
    engine.restart()
    (pages,) = engine.kv.groups.windows
    found = engine.run([request("a", golden.prompt_ids, max_tokens=64)])["a"]
    assert found.token_ids == golden.output_ids.tolist()
    assert pages.pool.num_free == pages.pool.num_usable
    assert engine.executor.model_info.windows[0][0] == CHUNKS.get(golden.name, 8)


def test_chunks_neighbours_hits_and_preemption_change_no_token(case: tuple[GoldenCheckpoint, ModelEngine]) -> None:
    (golden, engine), rng = case, np.random.default_rng(0)
    prompts = [np.concatenate([golden.prompt_ids, rng.integers(3, 200, 1 + 9 * i)]) for i in range(5)]
    messages = [request(str(i), each, max_tokens=30) for i, each in enumerate(prompts)]
    alone = []
    for message in messages:
        engine.restart()
        alone.append(engine.run([message])[message.request_id].token_ids)
    for options in ({}, {"max_num_batched_tokens": 7}, {"num_blocks": 12}, {"overlap": False}, {"max_burst_ms": 0.0}):
        engine.restart(**options)  # type: ignore[arg-type]
        together = engine.run(messages)
        assert [together[each.request_id].token_ids for each in messages] == alone, options
        assert engine.num_preemptions > 0 or "num_blocks" not in options, "the pool was meant to be too small"
    again = engine.run(messages)
    assert [again[each.request_id].token_ids for each in messages] == alone
    assert all(again[each.request_id].num_cached_tokens for each in messages)
