"""The KV pages that one replica holds, as far as a router knows.

A replica publishes the hashes of the pages in its prefix cache (`kv/block_pool.py`). A request that was routed
a moment ago has not computed its pages yet, and requests with the same prefix may follow at once. Pages of routed requests
therefore count as expected until the replica's own report covers them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from jaxserve.types import BlockHash


class HeldPages:
    """Published pages of a replica, and pages that are expected of requests it was given."""

    def __init__(self) -> None:
        self._published: set[BlockHash] = set()
        self._expected: Counter[BlockHash] = Counter()
        self._ended: list[Sequence[BlockHash]] = []
        """Pages of requests that ended since the last snapshot."""
        self._covered_next: list[Sequence[BlockHash]] = []
        """Pages of requests that ended before the last snapshot arrived; the next one covers them."""

    @property
    def published(self) -> Collection[BlockHash]:
        """The pages that the replica has reported and not withdrawn."""
        return self._published

    def __len__(self) -> int:
        """Return the number of published and of expected pages. One that is both counts twice."""
        return len(self._published) + len(self._expected)

    def num_leading(self, pages: Sequence[BlockHash]) -> int:
        """Return how many of `pages` the replica holds, or is about to hold, before the first that it does not.

        Looks at few of them, since a sequence is evicted from its end (`BlockPool.release`): the step doubles until a page
        is missing, and a binary search finds the first missing one.
        """
        low, step = 0, 1
        while low + step <= len(pages) and self._has(pages[low + step - 1]):
            low, step = low + step, 2 * step
        high = min(low + step, len(pages) + 1) - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._has(pages[middle - 1]) else (low, middle - 1)
        return low

    def expect(self, pages: Iterable[BlockHash]) -> None:
        """Count the pages of a request that was routed to the replica."""
        self._expected.update(pages)

    def change(self, published: Iterable[BlockHash], evicted: Iterable[BlockHash]) -> None:
        """Apply an event of the replica. Events are complete and in order."""
        self._published.update(published)
        self._published.difference_update(evicted)

    def settle(self, pages: Sequence[BlockHash]) -> None:
        """Stop expecting the pages of a request: it has ended, and events report what it left."""
        self._drop(pages)

    def settle_later(self, pages: Sequence[BlockHash]) -> None:
        """Stop expecting the pages of a request that has ended, once a snapshot made after its end has arrived."""
        self._ended.append(pages)

    def replace(self, published: Iterable[BlockHash]) -> None:
        """Take a snapshot of all published pages, for replicas that send snapshots instead of events.

        Snapshots have no common clock with the router: the one after the next to arrive is certainly made after a
        request's end.
        """
        self._published = set(published)
        for pages in self._covered_next:
            self._drop(pages)
        self._covered_next, self._ended = self._ended, []

    def clear(self) -> None:
        """Forget everything: the replica's engine was restarted."""
        self._published.clear()
        self._expected.clear()
        self._ended.clear()
        self._covered_next.clear()

    def _has(self, page: BlockHash) -> bool:
        return page in self._published or page in self._expected

    def _drop(self, pages: Sequence[BlockHash]) -> None:
        for page in pages:
            left = self._expected[page] - 1
            if left > 0:
                self._expected[page] = left
            else:
                del self._expected[page]
