"""The table of options: each one changes tokens or log-probabilities, and its default changes nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from jaxserve.sampling.params import (
    COLUMNS,
    DEFAULTS,
    PADDING_ROW,
    EngineSamplingParams,
    TokenIds,
    column_value,
    device_row,
    needs_state,
    option_type,
)
from jaxserve.sampling.sampler import TRANSFORMS, Sampled
from tests.unit.sampling.rows import Row, choose

VOCAB, NUM_ROWS, EOS = 300, 32, 2
COLLECTIONS = ({7: 90.0}, [9, 4], [(7,)])


def examples(name: str) -> list[Any]:
    """Return values of an option within its range, other than its default."""
    default = DEFAULTS[name] or 0
    numbers = (1.0, 2.0, 0.5, 1, 9) if column_value(default) == default else ()
    found = []
    for value in (*numbers, *(default + 0.25, default - 0.25), *COLLECTIONS):
        try:
            found.append(msgspec.convert(value, option_type(name, TokenIds)))
        except msgspec.ValidationError:
            continue
    return [value for value in found if value != DEFAULTS[name]]


def sampled(**options: Any) -> Sampled:
    logits = np.random.default_rng(1).normal(0, 2, (NUM_ROWS, VOCAB)).astype(np.float32)
    logits[:, [EOS, 7]] += 6
    params = [EngineSamplingParams(**{"seed": seed, **options}) for seed in range(NUM_ROWS)]
    rows = [Row(*row, (5, 7, 7), (7,), frozenset({EOS})) for row in zip(logits, params, strict=True)]
    return choose(rows, top=2)


@pytest.mark.parametrize("name", COLUMNS)
def test_every_option_changes_tokens_or_logprobs(name: str) -> None:
    expected = sampled()
    values = examples(name)
    assert values, f"no value of {name} is in its range"
    changed = [sampled(**{name: value}) for value in values]
    assert any((found[i] != expected[i]).any() for found in changed for i in (0, 2)), f"{name} changes nothing"


@pytest.mark.parametrize("name", COLUMNS)
def test_default_of_an_option_needs_no_state_and_other_values_as_declared(name: str) -> None:
    assert COLUMNS[name].keeps_state == bool(TRANSFORMS[name].state)
    for value in examples(name):
        assert needs_state(EngineSamplingParams(**{name: value})) == COLUMNS[name].keeps_state
    assert not needs_state(EngineSamplingParams(**{name: DEFAULTS[name]}))


def test_padding_rows_are_greedy_and_set_nothing() -> None:
    row = dict(zip(COLUMNS, PADDING_ROW.tolist(), strict=True))
    neutral = dict(zip(COLUMNS, device_row(EngineSamplingParams()).tolist(), strict=True))
    assert row == neutral | {"temperature": 0}
