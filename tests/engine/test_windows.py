"""Real (tiny) models whose sliding-window layers keep only the window's pages: the tokens are those of all pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import golden_checkpoint

pytestmark = [pytest.mark.slow]
NAME = "gemma2_tiny"
"""Two layers of four have a window of 8 tokens."""


@pytest.fixture(scope="module", params=["xla", "native"])
def engine(request: Any) -> Iterator[ModelEngine]:
    made = ModelEngine(golden_checkpoint(NAME).path, cpu_kernels=request.param)
    yield made
    made.executor.close()


def test_tokens_equal_transformers_while_pages_are_freed(engine: ModelEngine) -> None:
    golden = golden_checkpoint(NAME)
    engine.restart()
    (pages,) = engine.kv.groups.windows
    found = engine.run([request("a", golden.prompt_ids, max_tokens=64)])["a"]
    assert found.token_ids == golden.output_ids.tolist()
    assert pages.pool.num_free == pages.pool.num_usable
    assert engine.executor.model_info.windows[0][0] == 8


def test_chunks_neighbours_hits_and_preemption_change_no_token(engine: ModelEngine) -> None:
    golden, rng = golden_checkpoint(NAME), np.random.default_rng(0)
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
    again = engine.run(messages)
    assert [again[each.request_id].token_ids for each in messages] == alone
    assert all(again[each.request_id].num_cached_tokens for each in messages)
