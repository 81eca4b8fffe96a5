"""Tests of the limit on engine restarts."""

from __future__ import annotations

from jaxserve.runtime.engine_supervisor import RESTART_WINDOW_S, RestartBudget


def test_restarts_are_counted_within_a_window() -> None:
    now_s = 0.0
    budget = RestartBudget(2, lambda: now_s)
    assert budget.take()
    now_s = 1.0
    assert budget.take() and not budget.take()
    assert str(budget) == "2 of 2 restarts within 10 minutes"
    now_s = RESTART_WINDOW_S - 0.1
    assert not budget.take(), "a restart that was refused is none"
    now_s = RESTART_WINDOW_S
    assert budget.take() and not budget.take(), "the first is long ago"
    now_s = 2 * RESTART_WINDOW_S
    assert budget.take() and budget.take() and not budget.take()


def test_no_restarts_are_none() -> None:
    assert not RestartBudget(0).take()
