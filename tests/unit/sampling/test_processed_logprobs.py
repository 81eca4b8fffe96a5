"""Processed log-probabilities: those of the distribution that tokens are drawn from, against a specification in numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.types import MAX_TOP_LOGPROBS, NO_LOGPROBS
from tests.unit.sampling.rows import NUM_ROWS, Row, choose
from tests.unit.sampling.test_adjust import EOS, OPTIONS, OUTPUT, PROMPT, VOCAB, logits, specification
from tests.unit.sampling.test_sampler import kept

CUTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 2, "top_p": 0.1, "min_p": 0.5},
    {"temperature": 0.7},
    {"temperature": 2.0},
    {"top_k": 5},
    {"top_k": 100},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
]
IMPOSSIBLE = -1e10


def reference(row: Row) -> np.ndarray:
    """Log-softmax, in float64, of what the row is drawn from; of a greedy row, of what it takes the largest entry of."""
    values = specification(row).astype(np.float64)
    if row.params.temperature > 0:
        restricted = kept(values, row.params)
        values = np.where(restricted, values / row.params.temperature, -np.inf)
    best = values.max()
    return values - best - np.log(np.exp(values - best).sum())


def rows(cuts: dict[str, Any], seed: int = 0) -> list[Row]:
    return [
        Row(logits(i), EngineSamplingParams(**options, **cuts, seed=seed + i), PROMPT, OUTPUT, frozenset({EOS, 40}))
        for i, options in enumerate(OPTIONS)
    ]


def processed(batch: list[Row], top: int = MAX_TOP_LOGPROBS) -> Any:
    return choose(batch, top=top, mode="processed_logprobs")


@pytest.mark.parametrize("cuts", CUTS, ids=repr)
def test_log_probabilities_are_those_of_the_distribution_that_is_drawn_from(cuts: dict[str, Any]) -> None:
    """With every option of the stages before, in one batch."""
    batch = rows(cuts)
    found = processed(batch)
    for i, row in enumerate(batch):
        expected = reference(row)
        assert float(found.logprobs[i]) == pytest.approx(expected[int(found.token_ids[i])], abs=2e-5)
        ids, values = np.asarray(found.top_token_ids[i]), np.asarray(found.top_logprobs[i], np.float64)
        is_possible = expected[ids] > IMPOSSIBLE
        np.testing.assert_allclose(values[is_possible], expected[ids][is_possible], atol=2e-5)
        assert (values[~is_possible] < IMPOSSIBLE).all()
        if not row.params.logprob_token_ids:
            assert len(set(ids.tolist())) == MAX_TOP_LOGPROBS
            assert (ids < VOCAB).all()
            np.testing.assert_allclose(expected[ids][is_possible], -np.sort(-expected)[: is_possible.sum()], atol=2e-5)


def test_probabilities_of_all_tokens_that_a_cut_leaves_add_up_to_one() -> None:
    batch = [replace(row, params=replace(row.params, logprob_token_ids=None)) for row in rows({"top_k": 20})]
    np.testing.assert_allclose(np.exp(processed(batch).top_logprobs).sum(-1), 1.0, atol=1e-5)


def test_only_token_that_is_allowed_has_probability_one() -> None:
    row = Row(logits(), EngineSamplingParams(allowed_token_ids=(17,), temperature=0.3), PROMPT, OUTPUT)
    found = processed([row])
    assert found.token_ids.tolist() == [17]
    assert found.logprobs.tolist() == [0.0]


@pytest.mark.parametrize("cuts", [CUTS[0], CUTS[-1]], ids=repr)
def test_mode_changes_no_token(cuts: dict[str, Any]) -> None:
    batch = [row for seed in range(0, 100, 10) for row in rows(cuts, seed)][:NUM_ROWS]
    raw, ours, unwanted = choose(batch), processed(batch), processed(batch, NO_LOGPROBS)
    np.testing.assert_array_equal(ours.token_ids, raw.token_ids)
    np.testing.assert_array_equal(unwanted.token_ids, raw.token_ids)


def test_row_has_the_same_bits_alone_and_beside_every_other_option() -> None:
    batch = [*rows(CUTS[-1])[:16], *rows(CUTS[0])[:16]]
    together = processed(batch)
    for i, row in enumerate(batch):
        alone = processed([row])
        for whole, one in zip(together, alone, strict=True):
            np.testing.assert_array_equal(np.asarray(whole)[i], np.asarray(one)[0])


def test_both_modes_agree_if_nothing_changes_the_distribution() -> None:
    batch = [Row(logits(i), EngineSamplingParams(seed=i), PROMPT, OUTPUT) for i in range(4)]
    raw, ours = choose(batch, top=5), processed(batch, 5)
    np.testing.assert_array_equal(ours.logprobs, raw.logprobs)
    np.testing.assert_array_equal(ours.top_logprobs, raw.top_logprobs)
