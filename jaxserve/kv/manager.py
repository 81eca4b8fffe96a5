"""KV pages of requests: start, extend, publish, free.

A request with `num_tokens` known tokens, of which `num_computed` are computed, has these pages:

    tokens                         pages                  written by
    0 ... cached - 1               shared, published      no step any more: full and immutable
    cached ... num_computed - 1    own                    earlier steps; full ones are published
    num_computed ... num_tokens-1  own, not published     steps to come

Requests that start with the same full pages, as the choices of `n` do, compute them once: while one computes them, the
others are not started.

Only own pages are written. At least one known token is always left to compute (a step has to produce
logits), so when every page of a prompt is cached, the last one is computed again, into an own page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.kv.block_pool import BlockPool
from jaxserve.kv.block_table import AllocationFailure, BlockTable, HashChain
from jaxserve.kv.page_changes import PageChanges
from jaxserve.types import BlockHash, BlockId


class KVManager:
    """The pages of one engine: `num_blocks` of `block_size` tokens, the null page among them."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        *,
        enable_prefix_caching: bool = True,
        changes: PageChanges | None = None,
    ) -> None:
        """changes: records the pages that the prefix cache gains and loses; None: they are not recorded."""
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, changes)
        self._max_blocks = self.num_blocks_for(max_model_len)
        self._enable_prefix_caching = enable_prefix_caching
        self._pending: dict[BlockHash, int] = {}
        """The last shareable page of each prompt that is being computed, and the number of shareable pages; see
        `BlockTable.pending`."""

    @property
    def num_usable_tokens(self) -> int:
        """Tokens that a single request could hold."""
        return self.pool.num_usable * self.block_size

    @property
    def usage(self) -> float:
        """Share of the pages that requests hold."""
        return 1.0 - self.pool.num_free / self.pool.num_usable

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def new_table(self, cache_salt: str | None, adapter: int = 0) -> BlockTable:
        """Return an empty table for a new request of this adapter."""
        return BlockTable(self._max_blocks, HashChain(self.block_size, cache_salt, adapter))

    def find_prefix(self, table: BlockTable, tokens: np.ndarray) -> list[BlockId]:
        """Return the cached pages that `tokens` start with. Changes nothing."""
        blocks: list[BlockId] = []
        if self._enable_prefix_caching:
            for index in range((len(tokens) - 1) // self.block_size):
                block = self.pool.find(table.chain.hash(index, tokens))
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def start(
        self, table: BlockTable, tokens: np.ndarray, *, num_spare_blocks: int = 0, may_share: bool = True
    ) -> int | None:
        """Give `table` pages for all `tokens`, cached ones first; returns the number of cached tokens.

        Returns None, and takes nothing, if the pool cannot hold all of them now and leave `num_spare_blocks` free, or if
        another table is about to publish the same pages. Pages for all tokens at once keep a request from being
        preempted in the middle of its prompt. A failed call may be repeated at every step: its cost does not grow with
        the prompt until the pool has changed enough.

        may_share: False for a request that computes all of its pages, cached or not.
        """
        num_shareable = (len(tokens) - 1) // self.block_size if self._enable_prefix_caching else 0
        last = table.chain.hash(num_shareable - 1, tokens) if num_shareable else None
        if may_share and (last in self._pending or self._must_still_fail(table, len(tokens), num_spare_blocks)):
            return None
        cached = self.find_prefix(table, tokens) if may_share else []
        if len(cached) == num_shareable or last in self._pending:
            last = None
        num_missing = self.num_blocks_for(len(tokens)) - len(cached)
        num_free_cached = self.pool.num_free_among(cached)
        if num_missing + num_spare_blocks > self.pool.num_free - num_free_cached:
            if may_share:
                next_hash = table.chain.hash(len(cached), tokens) if len(cached) < num_shareable else None
                num_held = len(cached) - num_free_cached
                table.failure = AllocationFailure(len(tokens), len(cached), num_held, next_hash, self.pool.num_gains)
            return None
        table.failure = None
        self.pool.share(cached)  # first, or allocate might evict them
        table.append(cached)
        table.append(self.pool.allocate(num_missing))
        table.num_published = len(cached)
        if last is not None:
            table.pending = last
            self._pending[last] = num_shareable
        return len(cached) * self.block_size

    def extend(self, table: BlockTable, num_tokens: int) -> bool:
        """Make the table hold `num_tokens`. Returns False, and takes nothing, if the pool has too few pages."""
        if num_tokens <= table.num_blocks * self.block_size:
            return True
        num_missing = self.num_blocks_for(num_tokens) - table.num_blocks
        if num_missing > self.pool.num_free:
            return False
        table.append(self.pool.allocate(num_missing))
        return True

    def extend_all(self, needs: Sequence[tuple[BlockTable, int]]) -> bool:
        """Extend every table to its number of tokens, or none."""
        num_missing = sum(max(0, self.num_blocks_for(tokens) - table.num_blocks) for table, tokens in needs)
        if num_missing > self.pool.num_free:
            return False
        return all(self.extend(table, num_tokens) for table, num_tokens in needs)

    def may_publish(self, table: BlockTable, num_computed: int) -> bool:
        """Return True if `publish` has pages to publish: once in `block_size` steps of a request."""
        return num_computed >= (table.num_published + 1) * self.block_size and self._enable_prefix_caching

    def publish(self, table: BlockTable, tokens: np.ndarray, num_computed: int) -> None:
        """Cache the pages that the first `num_computed` tokens have filled."""
        if not self.may_publish(table, num_computed):
            return
        num_full = num_computed // self.block_size
        for index in range(table.num_published, num_full):
            self.pool.cache(BlockId(int(table.row[index])), table.chain.hash(index, tokens))
        table.num_published = num_full
        if table.pending is not None and num_full >= self._pending[table.pending]:
            self._drop_pending(table)

    def free(self, table: BlockTable) -> None:
        """Release all pages; published ones stay cached until they are evicted."""
        self._drop_pending(table)
        self.pool.release(table.blocks)
        table.clear()

    def reset_prefix_cache(self) -> None:
        """Forget every published page that no request holds."""
        self.pool.forget_evictable()

    def _must_still_fail(self, table: BlockTable, num_tokens: int, num_spare_blocks: int) -> bool:
        """Return True if the pool is too full for `table` even if every gain since its failure was one of its pages.

        Cached pages count only if a request holds them: the others are taken from the free ones. No more pages than at
        the failure are cached as long as the first one that was missing is missing.
        """
        failure = table.failure
        if failure is None or failure.num_tokens != num_tokens:
            return False
        if failure.next_hash is not None and self.pool.find(failure.next_hash) is not None:
            return False
        num_held = min(failure.num_held + self.pool.num_gains - failure.num_gains, failure.num_cached)
        return self.num_blocks_for(num_tokens) - num_held + num_spare_blocks > self.pool.num_free

    def _drop_pending(self, table: BlockTable) -> None:
        """Let other requests start that waited for the pages of this table."""
        if table.pending is not None:
            del self._pending[table.pending]
            table.pending = None
