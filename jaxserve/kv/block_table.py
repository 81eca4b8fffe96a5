"""The pages of one request, in the order of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.kv.prefix_cache import HashChain
from jaxserve.types import NULL_BLOCK, BlockHash, BlockId


@dataclass(frozen=True, slots=True)
class AllocationFailure:
    """The state of the pool when a table last got no pages."""

    num_tokens: int
    num_cached: int
    """Cached pages that the request starts with."""
    num_held: int
    """Cached pages that requests held: the others save nothing, since they count as free."""
    next_hash: BlockHash | None
    """The hash of the first page that was not cached; None if all were."""
    num_gains: int
    """`BlockPool.num_gains` at that time."""


class BlockTable:
    """Page i holds tokens `i * block_size ... (i + 1) * block_size - 1`. The table grows until it is cleared."""

    __slots__ = ("chain", "failure", "num_blocks", "num_published", "pending", "row")

    def __init__(self, max_blocks: int, chain: HashChain) -> None:
        self.row = np.full(max_blocks, NULL_BLOCK, np.int32)  # as the device reads it
        self.num_blocks = 0
        self.num_published = 0
        """Leading pages that are cached, or whose content another page has in the cache."""
        self.chain = chain
        self.pending: BlockHash | None = None
        """The last page of a prefix that other requests can share, while this request computes it."""
        self.failure: AllocationFailure | None = None

    @property
    def blocks(self) -> list[BlockId]:
        return [BlockId(block) for block in self.row[: self.num_blocks].tolist()]

    def append(self, blocks: Sequence[BlockId]) -> None:
        end = self.num_blocks + len(blocks)
        self.row[self.num_blocks : end] = blocks
        self.num_blocks = end

    def clear(self) -> None:
        self.row[: self.num_blocks] = NULL_BLOCK
        self.num_blocks = 0
        self.num_published = 0
