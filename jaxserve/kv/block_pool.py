"""Fixed pages: who holds how many references, which are free, which free ones still hold something useful.

A page is in exactly one state:

    state      references  named  next
    null       -           no     page 0, never given out: padding writes land there
    held       >= 1        maybe  `release` of the last reference
    blank      0           no     given out first, most recently used first
    reusable   0           yes    revived by `share`; evicted, least recently released first, when no blank is left

The name of a page (a `BlockHash`) says what its slots contain. Equal content in two pages is not merged:
the first one keeps the name and the second stays nameless, so that block tables only ever grow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jaxserve.types import NULL_BLOCK, BlockHash, BlockId


class BlockPool:
    """Pages 1 ... num_blocks - 1. Misuse (double release, exhausted pool) raises RuntimeError."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks holds nothing beside the null block")
        self._references = [0] * num_blocks
        self._names: list[BlockHash | None] = [None] * num_blocks
        self._named: dict[BlockHash, BlockId] = {}
        self._blank = [BlockId(i) for i in range(num_blocks - 1, NULL_BLOCK, -1)]
        self._reusable: OrderedDict[BlockId, None] = OrderedDict()  # a linked list: O(1) removal anywhere
        self.num_gains = 0
        """How often a page came to be both named and held."""

    @property
    def num_usable(self) -> int:
        """Pages that requests can hold at most."""
        return len(self._references) - 1

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give out now."""
        return len(self._blank) + len(self._reusable)

    def num_free_among(self, blocks: Iterable[BlockId]) -> int:
        """How many of `blocks` nobody holds."""
        return sum(self._references[block] == 0 for block in blocks)

    def blank_blocks(self) -> list[BlockId]:
        """Free pages without content."""
        return list(self._blank)

    def references(self, block: BlockId) -> int:
        return self._references[block]

    def allocate(self, count: int) -> list[BlockId]:
        """`count` nameless pages with one reference each."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks wanted, {self.num_free} are free")
        blocks = []
        for _ in range(count):
            block = self._blank.pop() if self._blank else self._evict()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[BlockId]) -> None:
        """One more reference to each of these named pages."""
        for block in blocks:
            if self._references[block] == 0:
                del self._reusable[block]
                self.num_gains += 1
            self._references[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """One reference less to each, the last page first: the end of a sequence is evicted before its start."""
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise RuntimeError(f"block {block} is released more often than it was taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._names[block] is None:
                    self._blank.append(block)
                else:
                    self._reusable[block] = None

    def find(self, name: BlockHash) -> BlockId | None:
        """The page of that name, held or not."""
        return self._named.get(name)

    def name(self, block: BlockId, name: BlockHash) -> None:
        """Say what a held page contains. Nothing happens when another page has the name already."""
        if self._references[block] <= 0 or self._names[block] is not None:
            raise RuntimeError(f"block {block} cannot be named: it is free or has a name")
        if name not in self._named:
            self._named[name] = block
            self._names[block] = name
            self.num_gains += 1

    def forget_reusable(self) -> None:
        """Turn every reusable page into a blank one."""
        while self._reusable:
            self._blank.append(self._evict())

    def _evict(self) -> BlockId:
        block, _ = self._reusable.popitem(last=False)
        name = self._names[block]
        if name is None:
            raise RuntimeError(f"block {block} is reusable without a name")
        self._names[block] = None
        del self._named[name]
        return block
