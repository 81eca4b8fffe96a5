"""The pages of one request, in the order of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.kv.prefix_cache import HashChain
from jaxserve.types import NULL_BLOCK, BlockHash, BlockId


@dataclass(frozen=True, slots=True)
class AllocationFailure:
    """Why a table got no pages when it was last asked for."""

    num_tokens: int
    num_cached: int
    """Pages of its start that were found."""
    num_held: int
    """Those of them that somebody held: the others are no gain, since they are free pages as well."""
    next_name: BlockHash | None
    """The first page that was not found; None where all were."""
    num_gains: int
    """The pool's, at that time."""


class BlockTable:
    """Page i holds tokens `i * block_size ... (i + 1) * block_size - 1`. Grows, until it is cleared."""

    __slots__ = ("chain", "coming", "failure", "num_blocks", "num_published", "row")

    def __init__(self, max_blocks: int, chain: HashChain) -> None:
        self.row = np.full(max_blocks, NULL_BLOCK, np.int32)  # as the device reads it
        self.num_blocks = 0
        self.num_published = 0
        """Leading pages that are in the prefix cache, or whose content another page has there."""
        self.chain = chain
        self.coming: BlockHash | None = None
        """The last page of a start that others may share, as long as this request is the one that computes it."""
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
