"""The event loop of API processes measures its turns: how long it looked at no socket."""

from __future__ import annotations

import asyncio

from jaxserve.http.event_loop import LONG_TURN_S, MeasuredLoop, TurnSelector, run_measured


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_turn_is_the_time_between_two_looks_at_the_sockets() -> None:
    clock = Clock()
    turns = TurnSelector(clock)
    turns.select(0)
    for seconds in (0.001, LONG_TURN_S, 0.05, 0.021):
        clock.now_s += seconds
        turns.select(0)
    assert (turns.num_turns, turns.num_long) == (4, 2)
    assert round(turns.end_period(), 6) == 0.05
    clock.now_s += 0.01
    turns.select(0)
    assert round(turns.end_period(), 6) == 0.05, "the longest one of the last minute is remembered"
    for _ in range(240):
        turns.end_period()
    assert turns.end_period() == 0
    turns.close()


def test_a_callback_that_blocks_the_loop_is_counted_and_one_in_a_thread_is_not() -> None:
    clock = Clock()

    async def main() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MeasuredLoop)
        loop.turns._clock = clock
        await asyncio.sleep(0)
        before = loop.turns.num_long
        clock.now_s += 1.0
        await asyncio.sleep(0)
        blocked = loop.turns.num_long - before
        await asyncio.to_thread(len, "")
        return blocked, loop.turns.num_long - before

    assert run_measured(main()) == (1, 1)
