"""The pages of a prefix that a fetch has restored."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.kv.block_pool import BlockPool
from jaxserve.types import BlockHash, BlockId


class RestoredPages:
    """The leading pages of one prefix: they are in the prefix cache and free.

    Finding all of them for every batch would take a time that grows with the square of the prefix. When all were found and
    counted as used, pages of others were less recently used, and are evicted before: until the pool has taken as many pages,
    those of the prefix are safe. `count_as_used` puts the pages of all batches in the order in which a request leaves them.
    """

    def __init__(self, pool: BlockPool, hashes: Sequence[BlockHash], count: int, rank: int) -> None:
        """hashes: all pages of the prefix. count: those that are cached."""
        self.count = count
        """The number of pages."""
        self._pool = pool
        self._hashes = hashes
        self._rank = rank
        self._safe_until = -1
        """`_num_taken` up to which no page of the prefix was evicted."""

    def are_cached(self) -> bool:
        """Return False if one was evicted meanwhile: without it the rest is of no use."""
        return self._num_taken <= self._safe_until or len(self._find()) == self.count

    def add(self, count: int) -> list[BlockId] | None:
        """Return blocks for the next pages, which are cached under their hashes from now on. None if there is no place for them next to
        those before, or if one of those was evicted."""
        num_evictions = max(0, count - len(self._pool.blank[self._rank]))
        is_safe = self._num_taken + num_evictions <= self._safe_until
        before = [] if is_safe else self._find()
        if not is_safe and len(before) < self.count:
            return None
        self._pool.share(before)
        if count > self._pool.num_free_of(self._rank):
            self._pool.release(before)
            return None
        blocks = self._pool.allocate(count, self._rank)
        num_taken = self._num_taken
        for block, block_hash in zip(blocks, self._hashes[self.count :], strict=False):
            self._pool.cache(block, block_hash)
        num_cached = self._num_taken - num_taken
        own = [*before, *blocks]
        self._pool.release(own)
        self.count += count
        if is_safe:
            self._safe_until += num_cached
        else:
            num_evictable = self._pool.num_free_of(self._rank) - len(self._pool.blank[self._rank])
            self._safe_until = self._num_taken + num_evictable - self._pool.num_free_among(own)
        return blocks

    def count_as_used(self) -> None:
        """Make the first page the most recently used one: the pool evicts the end of the prefix before its start."""
        pages = self._find()
        self._pool.share(pages)
        self._pool.release(pages)

    @property
    def _num_taken(self) -> int:
        """Pages that were evicted, forgotten or shared, or more: pages that become cached count as well."""
        return self._pool.num_gains + self._pool.num_forgotten

    def _find(self) -> list[BlockId]:
        """Return the pages up to the first that was evicted."""
        blocks: list[BlockId] = []
        for block_hash in self._hashes[: self.count]:
            if (block := self._pool.find(block_hash, self._rank)) is None:
                break
            blocks.append(block)
        return blocks
