"""Options that depend on generated tokens: the device counts them right, however the steps are run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from jaxserve.ipc.messages import AddRequest
from tests.engine.model_engine import MODEL_NAME, Generated, ModelEngine, request
from tests.models.goldens import golden_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.versions]

PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.3}
OPTIONS: list[dict[str, Any]] = [
    PENALTIES,
    {},
    {"repetition_penalty": 1.4, "temperature": 1.0, "seed": 1},
    {"bad_words": tuple((token,) for token in range(0, 200, 3)), "frequency_penalty": 0.1},
    {"min_tokens": 12, "ignore_eos": False, "logit_bias": {2: 8.0}, "temperature": 1.0, "seed": 2},
    {"allowed_token_ids": tuple(range(50, 90)), "presence_penalty": 0.9, "temperature": 1.3, "seed": 3},
    {"temperature": 0.8, "seed": 4, "num_top_logprobs": 2},
    {"logit_bias": {7: 4.0, 9: 4.0}, "frequency_penalty": 1.5, "logprob_token_ids": (9, 7), "num_top_logprobs": 2},
]


def mix(count: int, **more: Any) -> list[AddRequest]:
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 300, rng.integers(1, 60)) for _ in range(count)]
    return [request(str(i), prompt, **(OPTIONS[i % len(OPTIONS)] | more)) for i, prompt in enumerate(prompts)]


def tokens(results: dict[str, Generated]) -> dict[str, list[int]]:
    return {name: result.token_ids for name, result in results.items()}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}])
def test_penalties_equal_the_same_bias_token_by_token(engine: ModelEngine, sampling: dict[str, Any]) -> None:
    """The definition of OpenAI's penalties, applied by the host to one token at a time."""
    prompt = [5, 6, 7, 8]
    engine.restart(max_burst_ms=1e6)
    found = engine.run([request("a", prompt, **PENALTIES, **sampling)])["a"].token_ids
    assert engine.num_calls < engine.num_steps, "multi-step decode was expected"
    expected: list[int] = []
    for _ in found:
        bias = {token: -0.4 - 0.3 * times for token, times in Counter(expected).items()}
        one = request("a", [*prompt, *expected], logit_bias=bias, max_tokens=1, **sampling)
        engine.restart()
        expected += engine.run([one])["a"].token_ids
    assert found == expected
    engine.restart()
    assert found != engine.run([request("a", prompt, **sampling)])["a"].token_ids, "they were meant to change the text"


def test_options_mix_in_a_batch_without_touching_each_other(engine: ModelEngine) -> None:
    before = engine.executor.compilations()
    engine.restart()
    together = engine.run(mix(16))
    for item in mix(16):
        engine.restart()
        assert engine.run([item])[item.request_id].token_ids == together[item.request_id].token_ids, item.sampling
    assert engine.executor.compilations() == before
    assert set(together["5"].token_ids) <= set(range(50, 90))
    assert not any(token % 3 == 0 for token in together["3"].token_ids if token < 200)
    assert 12 <= len(together["4"].token_ids) < 24, "the bias was meant to end it as soon as it may"
    assert together["4"].finish_reason == "stop"
    assert all(entry.top_token_ids == [9, 7] for entry in together["7"].logprobs)
    assert all(entry.top_token_ids != [9, 7] for entry in together["6"].logprobs)


def test_preempted_request_counts_what_it_had(engine: ModelEngine) -> None:
    engine.restart()
    expected = tokens(engine.run(mix(8, max_tokens=50)))
    engine.restart(num_blocks=14)
    assert tokens(engine.run(mix(8, max_tokens=50))) == expected
    assert engine.num_preemptions > 0, "the pool was meant to be too small"


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunked_prompt_is_counted_once(engine: ModelEngine, chunk: int) -> None:
    item = request("a", [9] * 40 + [4, 5], repetition_penalty=2.0, frequency_penalty=0.5)
    engine.restart()
    whole = engine.run([item])["a"].token_ids
    engine.restart(max_num_batched_tokens=chunk)
    assert engine.run([item])["a"].token_ids == whole


@pytest.mark.parametrize("num_blocks", [None, 20])
def test_tokens_are_the_same_however_steps_overlap(engine: ModelEngine, num_blocks: int | None) -> None:
    found = []
    for overlap, max_burst_ms in [(False, 0.0), (True, 0.0), (False, 1e6), (True, 1e6)]:
        engine.restart(num_blocks, overlap=overlap, max_burst_ms=max_burst_ms)
        found.append(tokens(engine.run(mix(16, max_tokens=40))))
    assert all(other == found[0] for other in found)


@pytest.mark.slow
def test_tensor_parallel_counts_alike(engine: ModelEngine) -> None:
    """Every device has all counts, and its share of the heads."""
    engine.restart()
    expected = tokens(engine.run(mix(8)))
    path = golden_checkpoint(MODEL_NAME).path
    other = ModelEngine(path, max_num_seqs=2, max_num_batched_tokens=16, tensor_parallel_size=2, has_all_options=True)
    assert tokens(other.run(mix(8))) == expected
    assert other.executor.compilations()["serving"] == 0
    other.close()
