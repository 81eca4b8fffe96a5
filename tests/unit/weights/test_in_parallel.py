"""Work in parallel: never beyond its bound, in the given order, and ended by the first error."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from jaxserve.weights.in_parallel import in_parallel

MOST = 10


class Work:
    """Notes the costs in work at any time, and begins to end only when `num_together` items are in work."""

    def __init__(self, num_together: int) -> None:
        self._are_together = threading.Barrier(num_together)
        self._lock = threading.Lock()
        self._running: list[int] = []
        self.begun: list[int] = []
        self.most = 0

    def __call__(self, item: int) -> int:
        with self._lock:
            self._running.append(item)
            self.begun.append(item)
            self.most = max(self.most, sum(self._running))
        self._are_together.wait(60)
        with self._lock:
            self._running.remove(item)
        return -item


def test_items_are_done_together_as_far_as_their_costs_allow() -> None:
    work = Work(num_together=2)
    found = dict(in_parallel(work, [5, 4, 6, 3, 5, 5], lambda item: item, MOST, num_threads=3))
    assert found == {5: -5, 4: -4, 6: -6, 3: -3} and work.begun == [5, 4, 6, 3, 5, 5]
    assert work.most <= MOST


def test_no_more_items_than_threads_are_in_work_and_a_large_one_is_alone() -> None:
    work = Work(num_together=1)
    assert len(list(in_parallel(work, [1, 50, 1, 1], lambda item: item, MOST, num_threads=1))) == 4
    assert work.most == 50


def test_the_first_error_is_raised_and_no_further_item_is_begun() -> None:
    begun: list[int] = []

    def fail(item: int) -> None:
        begun.append(item)
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 1"):
        list(in_parallel(fail, [1, 2, 3], lambda item: 1, 1, num_threads=2))
    assert begun == [1]


@pytest.mark.parametrize("consume", [list, lambda found: next(iter(found), None)])
def test_nothing_to_do_is_done(consume: Callable[[object], object]) -> None:
    assert not consume(in_parallel(str, [], lambda item: 1, 1, num_threads=2))
