"""Tables from measured steps."""

from __future__ import annotations

import random

import pytest

from benchmarks.simulator.measure import Sample, fit_programs


def test_a_fit_finds_the_coefficients_among_steps_that_other_programs_delayed() -> None:
    chance = random.Random(0)
    samples = []
    for _ in range(400):
        features = (1, chance.randint(2, 64), chance.randint(10, 5000), chance.randint(0, 20_000))
        seconds = 0.01 + 2e-4 * features[1] + 3e-6 * features[2] + 1e-7 * features[3]
        delay = chance.choice([1.0, 1.0, 1.0, 3.0])
        samples.append(Sample("mixed/64", features, seconds * delay))
    times = fit_programs(samples)["mixed/64"]
    assert times.fixed_s == pytest.approx(0.01, rel=0.02)
    assert times.per_token_s == pytest.approx(2e-4, rel=0.02)
    assert times.per_key_s == pytest.approx(3e-6, rel=0.02)
    assert times.per_pair_s == pytest.approx(1e-7, rel=0.02)


def test_no_coefficient_is_negative() -> None:
    """One row for each key count: the number of tokens never varies, so only their sum with the fixed part is known."""
    times = fit_programs([Sample("decode/1", (1, 1, keys, 0), 0.02 - 1e-9 * keys) for keys in range(1, 50)])["decode/1"]
    assert min(times.fixed_s, times.per_token_s, times.per_key_s, times.per_pair_s) >= 0
    assert times.fixed_s + times.per_token_s == pytest.approx(0.02, rel=1e-3)
