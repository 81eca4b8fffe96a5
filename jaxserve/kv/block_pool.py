"""Pages of a fixed pool: reference counts, free pages, and free pages whose content is cached.

A page is in exactly one state:

    state      references  cached  next
    null       -           no      page 0, never allocated: padding writes go there
    held       >= 1        maybe   `release` of the last reference
    blank      0           no      allocated first, most recently used first
    evictable  0           yes     held again by `share`; evicted, least recently released first, if no blank is left

The hash of a cached page identifies its content. Equal content in two pages is not merged: the first one is cached and
the second is not, so that block tables only grow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jaxserve.kv.page_changes import PageChanges
from jaxserve.types import NULL_BLOCK, BlockHash, BlockId


class BlockPool:
    """Pages 1 ... num_blocks - 1. Misuse (double release, exhausted pool) raises RuntimeError."""

    def __init__(self, num_blocks: int, changes: PageChanges | None = None) -> None:
        """changes: gets the pages that become cached and those that are evicted; None: they are not recorded."""
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks holds only the null block")
        self._references = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._cached: dict[BlockHash, BlockId] = {}
        self._blank = [BlockId(i) for i in range(num_blocks - 1, NULL_BLOCK, -1)]
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()  # a linked list: O(1) removal anywhere
        self._changes = changes
        self.num_gains = 0
        """The number of times that a page became both cached and held."""

    @property
    def num_usable(self) -> int:
        """Pages that requests can hold at most."""
        return len(self._references) - 1

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can return now."""
        return len(self._blank) + len(self._evictable)

    def num_free_among(self, blocks: Iterable[BlockId]) -> int:
        """Return the number of `blocks` without a reference."""
        return sum(self._references[block] == 0 for block in blocks)

    def blank_blocks(self) -> list[BlockId]:
        """Return the free pages without cached content."""
        return list(self._blank)

    def references(self, block: BlockId) -> int:
        return self._references[block]

    def allocate(self, count: int) -> list[BlockId]:
        """Return `count` uncached pages with one reference each."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks wanted, {self.num_free} are free")
        blocks = []
        for _ in range(count):
            block = self._blank.pop() if self._blank else self._evict()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add a reference to each of these cached pages."""
        for block in blocks:
            if self._references[block] == 0:
                del self._evictable[block]
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
                    self._blank.append(block)
                else:
                    self._evictable[block] = None

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """Return the page that is cached under this hash, held or not."""
        return self._cached.get(block_hash)

    def cache(self, block: BlockId, block_hash: BlockHash) -> None:
        """Cache a held page under the hash of its content. Does nothing if another page is cached under it."""
        if self._references[block] <= 0 or self._hashes[block] is not None:
            raise RuntimeError(f"block {block} cannot be cached: it is free or cached")
        if block_hash not in self._cached:
            self._cached[block_hash] = block
            self._hashes[block] = block_hash
            self.num_gains += 1
            if self._changes is not None:
                self._changes.add(block_hash)

    def forget_evictable(self) -> None:
        """Turn every evictable page into a blank one."""
        while self._evictable:
            self._blank.append(self._evict())

    def _evict(self) -> BlockId:
        block, _ = self._evictable.popitem(last=False)
        block_hash = self._hashes[block]
        if block_hash is None:
            raise RuntimeError(f"block {block} is evictable and not cached")
        self._hashes[block] = None
        del self._cached[block_hash]
        if self._changes is not None:
            self._changes.remove(block_hash)
        return block
