"""Pages of a fixed pool: reference counts, free pages, and free pages whose content is cached.

A page is in exactly one state:

    state      references  cached  next
    null       -           no      page 0, never allocated: padding writes go there
    held       >= 1        maybe   `release` of the last reference
    blank      0           no      allocated first, most recently used first
    evictable  0           yes     held again by `share`; evicted, least recently released first, if no blank is left

The hash of a cached page identifies its content. Equal content in two pages is not merged: the first one is cached and
the second is not, so that block tables only grow.

Under data parallelism every rank has an equal share of the pages, the first of which is its null page; a request's pages
are all of one rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jaxserve.kv.page_changes import PageChanges
from jaxserve.types import NULL_BLOCK, BlockHash, BlockId


class BlockPool:
    """Pages 1 ... num_blocks - 1. Misuse (double release, exhausted pool) raises RuntimeError."""

    def __init__(self, num_blocks: int, changes: PageChanges | None = None, *, num_ranks: int = 1) -> None:
        """changes: gets the pages that become cached and those that are evicted; None: they are not recorded."""
        size = num_blocks // num_ranks
        if size < 2:
            raise ValueError(f"a pool of {size} blocks holds only the null block")
        self.num_ranks = num_ranks
        self._rank_size = size
        self._ranks = [block // size for block in range(num_blocks)]
        self._references = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._cached: list[dict[BlockHash, BlockId]] = [{} for _ in range(num_ranks)]
        self.blank = [
            [BlockId(i) for i in range(rank * size + size - 1, rank * size + NULL_BLOCK, -1)]
            for rank in range(num_ranks)
        ]
        """Free pages without cached content, by rank."""
        # Linked lists: O(1) removal anywhere.
        self._evictable: list[OrderedDict[BlockId, None]] = [OrderedDict() for _ in range(num_ranks)]
        self._changes = changes
        self.num_gains = 0
        """The number of times that a page became both cached and held."""
        self.num_evictions = 0
        """Cached pages that were given up for others."""
        self.num_forgotten = 0
        """Cached pages that were given up, for others or not."""

    @property
    def num_usable(self) -> int:
        """Pages that requests can hold at most."""
        return self.num_ranks * self.num_usable_by_one

    @property
    def num_usable_by_one(self) -> int:
        """Pages that one request can hold at most: those of its rank."""
        return self._rank_size - 1

    @property
    def num_free(self) -> int:
        """Pages without a reference."""
        return sum(map(self.num_free_of, range(self.num_ranks)))

    def num_free_of(self, rank: int) -> int:
        """Return the number of pages that `allocate` can return now."""
        return len(self.blank[rank]) + len(self._evictable[rank])

    def num_free_among(self, blocks: Iterable[BlockId]) -> int:
        """Return the number of `blocks` without a reference."""
        return sum(self._references[block] == 0 for block in blocks)

    def blank_blocks(self) -> list[BlockId]:
        """Return the free pages without cached content."""
        return [block for blank in self.blank for block in blank]

    def references(self, block: BlockId) -> int:
        return self._references[block]

    def allocate(self, count: int, rank: int = 0) -> list[BlockId]:
        """Return `count` uncached pages of one rank with one reference each."""
        if count > self.num_free_of(rank):
            raise RuntimeError(f"{count} blocks wanted, {self.num_free_of(rank)} are free")
        blocks = []
        for _ in range(count):
            if self.blank[rank]:
                block = self.blank[rank].pop()
            else:
                block = self._evict(rank)
                self.num_evictions += 1
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add a reference to each of these cached pages."""
        for block in blocks:
            if self._references[block] == 0:
                del self._evictable[self._ranks[block]][block]
                self.num_gains += 1
            self._references[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop a reference to each, the last page first: the end of a sequence is evicted before its start."""
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise RuntimeError(f"block {block} is released more often than it was taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hashes[block] is None:
                    self.blank[self._ranks[block]].append(block)
                else:
                    self._evictable[self._ranks[block]][block] = None

    def find(self, block_hash: BlockHash, rank: int | None = 0) -> BlockId | None:
        """Return the page of a rank, None: of any, that is cached under this hash, held or not."""
        if rank is None:
            return next((cached[block_hash] for cached in self._cached if block_hash in cached), None)
        return self._cached[rank].get(block_hash)

    def cache(self, block: BlockId, block_hash: BlockHash) -> None:
        """Cache a held page under the hash of its content. Does nothing if another page of its rank is cached under it."""
        if self._references[block] <= 0 or self._hashes[block] is not None:
            raise RuntimeError(f"block {block} cannot be cached: it is free or cached")
        cached = self._cached[self._ranks[block]]
        if block_hash not in cached:
            cached[block_hash] = block
            self._hashes[block] = block_hash
            self.num_gains += 1
            if self._changes is not None:
                self._changes.add(block_hash)

    def forget_evictable(self) -> None:
        """Turn every evictable page into a blank one."""
        for rank, evictable in enumerate(self._evictable):
            while evictable:
                self.blank[rank].append(self._evict(rank))

    def _evict(self, rank: int) -> BlockId:
        block, _ = self._evictable[rank].popitem(last=False)
        block_hash = self._hashes[block]
        if block_hash is None:
            raise RuntimeError(f"block {block} is evictable and not cached")
        self._hashes[block] = None
        self.num_forgotten += 1
        del self._cached[rank][block_hash]
        if self._changes is not None and not any(block_hash in cached for cached in self._cached):
            self._changes.remove(block_hash)
        return block
