"""Biases, penalties and masks against a specification in numpy that goes token by token."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxserve.sampling.masks import FORBIDDEN
from jaxserve.sampling.params import EngineSamplingParams, needs_state
from jaxserve.types import MAX_BAD_WORDS, MAX_LOGIT_BIAS
from tests.unit.sampling.rows import Row, adjusted, choose

VOCAB = 300
EOS = 2
PROMPT = (5, 6, 6, 7, 299)
OUTPUT = (8, 6, 8, 8, 290)


def logits(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)


def specification(row: Row) -> np.ndarray:
    """The definitions of OpenAI (bias, presence, frequency), Hugging Face (repetition) and vLLM (the rest)."""
    params, values = row.params, row.logits.copy()
    for token, bias in (params.logit_bias or {}).items():
        values[token] += np.float32(bias)
    counts = Counter(row.output)
    for token in {*row.prompt, *row.output}:
        factor = np.float32(params.repetition_penalty)
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token, times in counts.items():
        values[token] -= np.float32(params.frequency_penalty) * np.float32(times)
        values[token] -= np.float32(params.presence_penalty)
    if params.allowed_token_ids:
        values[[token for token in range(VOCAB) if token not in params.allowed_token_ids]] = -np.inf
    if len(row.output) < params.min_tokens:
        values[list(row.stops)] = FORBIDDEN
    for *before, last in params.bad_words:
        if before == list(row.output[len(row.output) - len(before) :]) and len(before) <= len(row.output):
            values[last] = FORBIDDEN
    return values


OPTIONS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.3, "presence_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5, "frequency_penalty": 2.0},
    {"logit_bias": {8: -100.0, 0: 3.5, 299: 100.0}},
    {"logit_bias": {token: token / 10 - 12 for token in range(240)}, "repetition_penalty": 1.1},
    {"allowed_token_ids": (1, 31, 32, 299)},
    {"allowed_token_ids": tuple(range(0, 300, 7)), "presence_penalty": 2.0},
    {"min_tokens": 6},
    {"min_tokens": 5},
    {"bad_words": ((9,),)},
    {"bad_words": ((8, 290, 11), (290, 12), (6, 290, 13), (7, 299, 8, 6, 8, 8, 290, 14), (8, 6, 8, 8, 290, 15))},
    {"logprob_token_ids": (3, 299)},
    {"bad_words": tuple((290, token) for token in range(100, 100 + MAX_BAD_WORDS // 2)), "min_tokens": 100},
]


def rows() -> list[Row]:
    return [
        Row(logits(i), EngineSamplingParams(**options), PROMPT, OUTPUT, frozenset({EOS, 40}))
        for i, options in enumerate(OPTIONS)
    ]


@pytest.mark.parametrize("row", rows(), ids=lambda row: repr(row.params)[:60])
def test_adjusted_logits_are_the_specified_ones_alone(row: Row) -> None:
    np.testing.assert_allclose(adjusted([row])[0], specification(row), rtol=2e-6, atol=1e-6)


def test_adjusted_logits_are_the_specified_ones_in_a_batch() -> None:
    batch = rows()
    for row, found in zip(batch, adjusted(batch), strict=True):
        np.testing.assert_allclose(found, specification(row), rtol=2e-6, atol=1e-6)
        if not needs_state(row.params):
            np.testing.assert_array_equal(found, row.logits, "a neighbour's options reached this row")


def test_bad_words_see_generated_tokens_only() -> None:
    row = Row(logits(), EngineSamplingParams(bad_words=((7, 299, 11), (299, 8, 12))), PROMPT, (8,))
    assert (adjusted([row]) > FORBIDDEN).all(), "the prompt's tokens are not part of a word"
    assert np.flatnonzero(adjusted([replace(row, output=(299, 8))])[0] <= FORBIDDEN).tolist() == [12]


@pytest.mark.slow
def test_every_bias_of_the_largest_table_counts() -> None:
    wide = np.zeros(MAX_LOGIT_BIAS + 5, np.float32)
    bias = {token: 1.0 + token for token in range(MAX_LOGIT_BIAS)}
    found = adjusted([Row(wide, EngineSamplingParams(logit_bias=bias))])[0]
    assert found.tolist() == [*bias.values(), 0, 0, 0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"allowed_token_ids": (EOS, 40), "min_tokens": 9}, {EOS, 40}),
        ({"allowed_token_ids": (7,), "bad_words": ((7,),)}, {7}),
        ({"allowed_token_ids": (EOS, 7), "min_tokens": 9, "bad_words": ((7,),)}, {EOS, 7}),
    ],
)
def test_row_for_which_all_is_forbidden_still_chooses_from_its_list(options: Any, tokens: set[int]) -> None:
    for seed in range(5):
        params = EngineSamplingParams(**options, seed=seed)
        row = Row(logits(seed), params, PROMPT, OUTPUT, frozenset({EOS, 40}))
        assert int(choose([row]).token_ids[0]) in tokens


def test_greedy_tokens_follow_the_adjusted_logits() -> None:
    batch = [
        replace(row, params=EngineSamplingParams(**options, temperature=0.0))
        for row, options in zip(rows(), OPTIONS, strict=True)
    ]
    assert choose(batch).token_ids.tolist() == [int(specification(row).argmax()) for row in batch]


@pytest.mark.slow
def test_draws_follow_the_adjusted_distribution() -> None:
    """Chi-squared over cells of at least 5 expected draws; 5 standard deviations above its mean."""
    draws = 4000
    params = EngineSamplingParams(
        temperature=0.8,
        frequency_penalty=1.0,
        repetition_penalty=1.2,
        logit_bias={20: 4.0, 8: 3.0},
        bad_words=((290, 21),),
        top_k=50,
    )
    row = Row(logits(3), params, PROMPT, OUTPUT)
    scaled = specification(row).astype(np.float64) / params.temperature
    scaled[scaled < np.sort(scaled)[-params.top_k]] = -math.inf
    expected = np.exp(scaled - scaled.max())
    expected *= draws / expected.sum()
    counts = np.zeros(VOCAB)
    for start in range(0, draws, 1000):
        counts += np.bincount(choose([row] * 1000, np.arange(start, start + 1000)).token_ids, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    cells = expected >= 5
    statistic = ((counts - expected)[cells] ** 2 / expected[cells]).sum()
    freedom = int(cells.sum()) - 1
    assert freedom > 5
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_row_draws_the_same_alone_and_beside_every_other_option() -> None:
    batch = rows()
    together = choose(batch).token_ids.tolist()
    assert together == [int(choose([row]).token_ids[0]) for row in batch]


def test_logprobs_stay_those_of_the_model() -> None:
    row = Row(logits(), EngineSamplingParams(allowed_token_ids=(17,), logit_bias={17: 50.0}, presence_penalty=2.0))
    found = choose([row], top=3)
    expected = row.logits - np.log(np.exp(row.logits.astype(np.float64)).sum())
    assert found.token_ids.tolist() == [17]
    assert float(found.logprobs[0]) == pytest.approx(expected[17], abs=1e-5)
    assert found.top_token_ids[0, :3].tolist() == np.argsort(-row.logits)[:3].tolist()


def test_listed_tokens_stand_in_for_the_most_likely_ones_of_their_row_only() -> None:
    listed, plain = (
        Row(logits(i), EngineSamplingParams(**o)) for i, o in enumerate([{"logprob_token_ids": (9, 299, 4)}, {}])
    )
    found = choose([listed, plain], top=3)
    assert found.top_token_ids[0, :3].tolist() == [9, 299, 4]
    expected = listed.logits - np.log(np.exp(listed.logits.astype(np.float64)).sum())
    np.testing.assert_allclose(found.top_logprobs[0, :3], expected[[9, 299, 4]], atol=1e-5)
    np.testing.assert_array_equal(found.top_token_ids[1], choose([plain], top=3).top_token_ids[0])
