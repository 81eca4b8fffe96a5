"""Copies of the fake model's pages, and of its slots of recurrent states, between it and the tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.executor.fake.caches import POISON, PoisonError
from jaxserve.kv.tiers.page import CacheBlock, Page, PageLayout
from jaxserve.types import BlockId


@dataclass(frozen=True, slots=True)
class FakeCopies:
    """Pages between pool and host, both as a list."""

    copies: list[Page]
    rank: int = 0
    """Data rank that they are staged for."""

    @property
    def count(self) -> int:
        return len(self.copies)

    def pages(self) -> list[Page]:
        return self.copies

    def is_ready(self) -> bool:
        return True


class FakePages:
    """Copies of pages of a pool of token ids, or of slots of states. They are read at once, since no step under way may write to them,
    and written after the steps under way, which may still read a slot that was given away."""

    max_batch = 4

    def __init__(self, pool: np.ndarray, layout: PageLayout | None = None, num_ranks: int = 1) -> None:
        self._pool = pool
        self._rank_size = len(pool) // num_ranks
        self.finish_steps: Callable[[], None] = lambda: None
        """Computes the steps that were submitted before."""
        self.layout = layout or PageLayout("fake", str(pool.shape[1]), (CacheBlock("tokens", "ids", pool[0].nbytes),))

    def read(self, blocks: Sequence[BlockId]) -> FakeCopies:
        """Raises PoisonError for a page that holds nothing."""
        content = self._pool[list(blocks)]
        if (content == POISON).any():
            raise PoisonError(f"a page of {list(blocks)} is copied and holds nothing: {content.tolist()}")
        return FakeCopies([(row.view(np.uint8).copy(),) for row in content])

    def stage(self, pages: Sequence[Page], rank: int) -> FakeCopies:
        return FakeCopies([(tokens.copy(),) for (tokens,) in pages], rank)

    def write(self, blocks: Sequence[BlockId], staged: FakeCopies) -> None:
        """Raises PoisonError for a page of another rank, or for one that is never written."""
        self.finish_steps()
        for block, (tokens,) in zip(blocks, staged.copies, strict=True):
            if block // self._rank_size != staged.rank or block % self._rank_size == 0:
                raise PoisonError(f"{block} is written with a page for rank {staged.rank}")
            self._pool[block] = tokens.view(np.int64)
