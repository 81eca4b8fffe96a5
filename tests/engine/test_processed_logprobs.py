"""An engine of processed log-probabilities returns those of the distribution that it draws from, and the same tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxserve.ipc.messages import AddRequest
from tests.engine.model_engine import MODEL_NAME, Generated, ModelEngine, request
from tests.models.goldens import golden_checkpoint

pytestmark = pytest.mark.slow

LISTED = tuple(range(40, 57))
"""The only tokens that requests may get: the raw log-probabilities of all of them can be returned."""
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.4, "seed": 1},
    {"temperature": 0.7, "seed": 2, "frequency_penalty": 1.1, "logit_bias": {44: 2.5}},
    {"temperature": 1.2, "seed": 3, "presence_penalty": -0.8, "top_k": 4},
    {"temperature": 0.0, "frequency_penalty": 0.9},
]


@pytest.fixture(scope="module")
def processed() -> Iterator[ModelEngine]:
    engine = ModelEngine(
        golden_checkpoint(MODEL_NAME).path,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        logprobs_mode="processed_logprobs",
        has_all_options=True,
    )
    yield engine
    engine.close()


def requests(**more: Any) -> list[AddRequest]:
    limits = {"allowed_token_ids": LISTED, "max_tokens": 20} | more
    return [request(str(i), [5 + i, 6, 7], **limits, **options) for i, options in enumerate(OPTIONS)]


def distribution(raw: np.ndarray, options: dict[str, Any], before: list[int]) -> np.ndarray:
    """Return the log-probabilities of the listed tokens after `before`, from those of the model."""
    counts = Counter(before)
    times = np.array([counts[token] for token in LISTED])
    values = raw + [options.get("logit_bias", {}).get(token, 0.0) for token in LISTED]
    values -= options.get("frequency_penalty", 0.0) * times + options.get("presence_penalty", 0.0) * (times > 0)
    values /= options["temperature"] or 1.0
    if "top_k" in options:
        values[values < np.sort(values)[-options["top_k"]]] = -np.inf
    best = values.max()
    return values - best - np.log(np.exp(values - best).sum())


def test_values_are_computed_from_the_raw_ones_by_the_options(engine: ModelEngine, processed: ModelEngine) -> None:
    before = processed.executor.compilations()
    listed = requests(logprob_token_ids=LISTED, num_top_logprobs=len(LISTED))
    engine.restart()
    raw = engine.run(listed)
    processed.restart()
    found = processed.run(listed)
    for item, options in zip(listed, OPTIONS, strict=True):
        ours, theirs = found[item.request_id], raw[item.request_id]
        assert ours.token_ids == theirs.token_ids
        for i, (own, model) in enumerate(zip(ours.logprobs, theirs.logprobs, strict=True)):
            expected = distribution(np.array(model.top_logprobs), options, ours.token_ids[:i])
            is_possible = expected > -np.inf
            np.testing.assert_allclose(np.array(own.top_logprobs)[is_possible], expected[is_possible], atol=1e-4)
            assert own.logprob == pytest.approx(expected[LISTED.index(ours.token_ids[i])], abs=1e-4)
    assert processed.executor.compilations() == before


def chosen(results: dict[str, Generated]) -> list[float]:
    return [scores.logprob for _, result in sorted(results.items()) for scores in result.logprobs]


@pytest.mark.parametrize("how", [{"max_burst_ms": 1e6}, {"num_speculative_tokens": 3}], ids=repr)
def test_values_do_not_depend_on_how_steps_are_run(processed: ModelEngine, how: dict[str, Any]) -> None:
    wanted = requests(num_top_logprobs=0)
    processed.restart(overlap=False, max_burst_ms=0)
    one_by_one = processed.run(wanted)
    processed.restart(**how)
    together = processed.run(wanted)
    assert "max_burst_ms" not in how or processed.num_calls < processed.num_steps
    assert {name: each.token_ids for name, each in together.items()} == {
        name: each.token_ids for name, each in one_by_one.items()
    }
    np.testing.assert_allclose(chosen(together), chosen(one_by_one), atol=1e-4)
