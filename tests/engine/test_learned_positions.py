"""Learned embeddings of positions in the whole engine: a token's position is that in its request, whatever else a step computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import GoldenCheckpoint, golden_checkpoint

pytestmark = pytest.mark.slow
GOLDENS = [golden_checkpoint(name) for name in ("gpt2_tiny", "opt_tiny")]
"""The first position has the first row of one table and the third row of the other."""
OTHER = [9, 8, 7, 6, 5]


@pytest.fixture(scope="module", params=GOLDENS, ids=lambda golden: golden.name)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[ModelEngine, GoldenCheckpoint]]:
    """Up to 2 requests and 48 tokens a step. Begin with `restart`."""
    engine = ModelEngine(request.param.path, max_num_seqs=2, max_num_batched_tokens=48)
    yield engine, request.param
    engine.close()


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 7}, {"num_speculative_tokens": 3}, {"overlap": False}, {"num_blocks": 8}],
    ids=str,
)
def test_tokens_equal_transformers_beside_another_request(
    case: tuple[ModelEngine, GoldenCheckpoint], options: dict[str, int]
) -> None:
    engine, golden = case
    engine.restart(**options)  # type: ignore[arg-type]
    results = engine.run([request("a", golden.prompt_ids, max_tokens=64), request("b", OTHER, max_tokens=60)])
    assert results["a"].token_ids == golden.output_ids.tolist()
    assert (engine.num_preemptions > 0) == ("num_blocks" in options)
    assert engine.executor.compilations()["serving"] == 0


def test_a_prefix_hit_goes_on_at_its_position(case: tuple[ModelEngine, GoldenCheckpoint]) -> None:
    engine, golden = case
    engine.restart()
    engine.run([request("a", [*golden.prompt_ids[:36], 5, 6])])
    hit = engine.run([request("b", golden.prompt_ids, max_tokens=64)])["b"]
    assert (hit.token_ids, hit.num_cached_tokens) == (golden.output_ids.tolist(), 32)
