"""Tests of the simulation of scheduling policies: the load of docs/benchmarks/fairness.md, and its repeatability."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fairness import draw, mixed_load, one_after_six_long_ones, simulate, table


def test_short_prompt_is_answered_early_and_the_load_takes_no_longer() -> None:
    before, after = (simulate(one_after_six_long_ones(), policy) for policy in ("priority", "fair"))  # type: ignore[arg-type]
    assert before.waits_s[5][0] > 0.9 * before.seconds, "the fault that the policy mends"
    assert after.waits_s[5][0] < 0.03 * after.seconds
    assert after.seconds == pytest.approx(before.seconds, rel=0.02)
    assert max(after.waits_s[1500]) <= 1.02 * max(before.waits_s[1500])


@pytest.mark.slow
def test_mixed_load_is_simulated_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    load = mixed_load(60, 1.3, seed=1)
    assert load == mixed_load(60, 1.3, seed=1)
    runs = {"priority": simulate(load, "priority"), "fair": simulate(load, "fair")}
    assert runs["fair"].num_steps == pytest.approx(runs["priority"].num_steps, rel=0.03)
    assert sum(len(waits) for waits in runs["fair"].waits_s.values()) == 60
    assert table(runs).count("\n| ") == len(runs["fair"].waits_s)  # type: ignore[arg-type]
    draw({1.3: runs}, tmp_path / "picture.png")  # type: ignore[dict-item]
    assert (tmp_path / "picture.png").stat().st_size > 10_000
