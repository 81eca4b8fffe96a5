"""Log-probabilities of a prompt's tokens equal those of their generation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import logsumexp

from jaxserve.ipc.messages import TokenLogprobs
from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import golden_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.versions]

PROMPT = [5, 6, 7]
NUM_OUTPUT = 60


def assert_same(found: list[TokenLogprobs], expected: list[TokenLogprobs], num_top: int) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert ours.top_logprobs == pytest.approx(theirs.top_logprobs[:num_top], abs=1e-4)
        better = [value for value in theirs.top_logprobs if value > theirs.logprob + 1e-4]
        if len(better) < len(theirs.top_logprobs):
            assert ours.rank == len(better) + 1


@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("chunk", [1, 16, 33, None])
def test_scores_of_a_prompt_are_those_of_its_generation(engine: ModelEngine, chunk: int | None, num_top: int) -> None:
    options = {"temperature": 1.5, "seed": 3, "max_tokens": NUM_OUTPUT}
    engine.restart()
    generated = engine.run([request("a", PROMPT, num_top_logprobs=20, **options)])["a"]
    before = engine.executor.compilations()
    engine.restart(max_num_batched_tokens=chunk)
    whole = [*PROMPT, *generated.token_ids]
    scored = request("b", whole, num_prompt_logprobs=num_top, max_tokens=2)
    for _ in range(2):  # the second time its pages are in the cache
        found = engine.run([scored])["b"]
        assert len(found.prompt_logprobs) == len(whole) - 1
        assert_same(found.prompt_logprobs[len(PROMPT) - 1 :], generated.logprobs, num_top)
        assert found.num_cached_tokens == 0
    plain = engine.run([request("c", whole, max_tokens=2)])["c"]
    assert plain.token_ids == found.token_ids
    assert plain.num_cached_tokens >= 48, "a scored prompt can be shared"
    assert plain.prompt_logprobs == []
    assert engine.executor.compilations() == before


def test_a_prompt_that_fills_the_context_is_scored(engine: ModelEngine) -> None:
    engine.restart()
    whole = np.random.default_rng(5).integers(3, 300, 128)
    shorter = engine.run([request("a", whole[:-1], num_prompt_logprobs=2, max_tokens=1)])["a"]
    for _ in range(2):
        found = engine.run([request("b", whole, num_prompt_logprobs=2, max_tokens=1)])["b"]
        assert len(found.prompt_logprobs) == 127
        assert_same(found.prompt_logprobs[:-1], shorter.prompt_logprobs, 2)
        assert (found.finish_reason, len(found.token_ids)) == ("length", 1)


@pytest.mark.parametrize("num_blocks", [None, 14])
def test_scoring_among_others_changes_nothing(engine: ModelEngine, num_blocks: int | None) -> None:
    """Also with preemption in between: log-probabilities that were reported are not reported again."""
    rng = np.random.default_rng(4)
    prompts = [rng.integers(3, 300, length) for length in (40, 55, 1, 2, 30)]
    items = [
        request(str(i), prompt, num_prompt_logprobs=[2, None][i % 2], max_tokens=40, temperature=float(i > 2), seed=i)
        for i, prompt in enumerate(prompts)
    ]
    engine.restart(num_blocks)
    together = engine.run(items)
    assert (engine.num_preemptions > 0) == (num_blocks is not None)
    for item in items:
        engine.restart()
        alone = engine.run([item])[item.request_id]
        assert together[item.request_id].token_ids == alone.token_ids
        is_scored = item.sampling.num_prompt_logprobs is not None
        assert len(alone.prompt_logprobs) == (len(item.prompt_token_ids) - 1 if is_scored else 0)
        assert_same(together[item.request_id].prompt_logprobs, alone.prompt_logprobs, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2), (2, 2, 2)], ids=str)
def test_devices_score_a_prompt_beside_requests_that_ask_for_no_scores(shape: tuple[int, int, int]) -> None:
    """The last layer's experts exchange tokens inside a branch that only steps with scores take. shape: devices by tensor, data and expert."""
    golden = golden_checkpoint("glm4_moe_tiny")
    names = ("tensor_parallel_size", "data_parallel_size", "expert_parallel_size")
    engine = ModelEngine(golden.path, max_num_seqs=4, **dict(zip(names, shape, strict=True)))  # type: ignore[arg-type]
    scored = request("a", golden.prompt_ids, max_tokens=8, num_prompt_logprobs=2)
    found = engine.run([scored, request("b", golden.prompt_ids[3:], max_tokens=8), request("c", [9, 8], max_tokens=8)])
    engine.close()
    assert found["a"].token_ids == golden.output_ids[:8].tolist()
    scores = golden.logits[:-1] - logsumexp(
        golden.logits[:-1], axis=-1, keepdims=True
    )  # of the last tokens of the prompt
    chosen = golden.prompt_ids[1 - len(golden.logits) :]
    expected = scores[np.arange(len(scores)), chosen]
    np.testing.assert_allclose(
        [each.logprob for each in found["a"].prompt_logprobs[-len(scores) :]], expected, atol=1e-4
    )
