"""The head of a Ray cluster ends after its workers, and not later."""

from __future__ import annotations

from jaxserve.ray.await_workers import await_workers


def test_the_head_waits_while_another_node_is_alive() -> None:
    states = iter([[True, True, False], [True, True], [True, False]])
    assert await_workers(lambda: [{"Alive": is_alive} for is_alive in next(states)], 60, poll_s=0)
    assert not list(states), "it looked until only one was left"


def test_the_head_ends_in_time_if_a_worker_does_not() -> None:
    assert not await_workers(lambda: [{"Alive": True}, {"Alive": True}], 0.01, poll_s=0.001)
