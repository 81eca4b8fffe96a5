"""Work on several items at a time, within a bound on what those in work take together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_parallel(
    work: Callable[[T], R], items: Iterable[T], cost: Callable[[T], int], most: int, num_threads: int
) -> Iterator[tuple[T, R]]:
    """Yield items and the results of `work`, in the order in which they are done; they are begun in the given order.

    The costs of the items in work are at most `most` together; one that costs more is done alone. Raises the first error of
    `work`, when the items in work are done; no other is begun.
    """
    waiting, running, used = deque(items), dict[Future[R], T](), 0
    with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as pool:
        while waiting or running:
            while waiting and len(running) < num_threads and (not running or used + cost(waiting[0]) <= most):
                item = waiting.popleft()
                used += cost(item)
                running[pool.submit(work, item)] = item
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                item = running.pop(done)
                used -= cost(item)
                try:
                    result = done.result()
                finally:
                    del done  # an error and this frame, which is in its traceback, would keep each other
                yield item, result
