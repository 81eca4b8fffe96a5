"""KV pages as the scheduler sees them: take, extend, publish, give back.

Of a request with `num_tokens` known tokens, of which `num_computed` are computed:

    tokens                         pages                  written by
    0 ... cached - 1               shared, published      nobody any more: full and immutable
    cached ... num_computed - 1    own                    earlier steps; full ones are published
    num_computed ... num_tokens-1  own, not published     steps to come

Two requests that start with the same full pages, as the choices of `n` do, compute them once: as long as one is at it,
the other is not started.

Only own pages are written. At least one known token is always left to compute (a step has to produce
logits), so when every page of a prompt is cached, the last one is computed again, into an own page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.kv.block_pool import BlockPool
from jaxserve.kv.block_table import AllocationFailure, BlockTable
from jaxserve.kv.prefix_cache import HashChain
from jaxserve.types import BlockHash, BlockId


class KVManager:
    """The pages of one engine: `num_blocks` of `block_size` tokens, the null page among them."""

    def __init__(
        self, num_blocks: int, block_size: int, max_model_len: int, *, enable_prefix_caching: bool = True
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._max_blocks = self.num_blocks_for(max_model_len)
        self._enable_prefix_caching = enable_prefix_caching
        self._coming: dict[BlockHash, int] = {}
        """The last shareable pages of prompts that are being computed, and how many pages that makes; see
        `BlockTable.coming`."""

    @property
    def num_usable_tokens(self) -> int:
        """Tokens that one request could hold if it were alone."""
        return self.pool.num_usable * self.block_size

    @property
    def usage(self) -> float:
        """Share of the pages that requests hold."""
        return 1.0 - self.pool.num_free / self.pool.num_usable

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def new_table(self, cache_salt: str | None, adapter: int = 0) -> BlockTable:
        """An empty table for a new request, of this adapter."""
        return BlockTable(self._max_blocks, HashChain(self.block_size, cache_salt, adapter))

    def find_prefix(self, table: BlockTable, tokens: np.ndarray) -> list[BlockId]:
        """The cached pages that `tokens` start with. Changes nothing."""
        blocks: list[BlockId] = []
        if self._enable_prefix_caching:
            for index in range((len(tokens) - 1) // self.block_size):
                block = self.pool.find(table.chain.name(index, tokens))
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def start(
        self, table: BlockTable, tokens: np.ndarray, *, num_spare_blocks: int = 0, may_share: bool = True
    ) -> int | None:
        """Pages for all `tokens`, cached ones first; returns how many tokens are cached.

        None, and nothing taken, when the pool cannot hold all of them now and leave `num_spare_blocks`
        free, or when another table is about to publish the very pages. Asking for all at once keeps a request
        from being preempted in the middle of its own prompt. may_share: False is for one that
        computes all of its pages, whoever has them. Whoever is refused may ask again at every step: what is looked up
        then does not grow with the prompt, as long as nothing has changed that could matter.
        """
        num_shareable = (len(tokens) - 1) // self.block_size if self._enable_prefix_caching else 0
        last = table.chain.name(num_shareable - 1, tokens) if num_shareable else None
        if may_share and (last in self._coming or self._must_still_fail(table, len(tokens), num_spare_blocks)):
            return None
        cached = self.find_prefix(table, tokens) if may_share else []
        if len(cached) == num_shareable or last in self._coming:
            last = None
        num_missing = self.num_blocks_for(len(tokens)) - len(cached)
        num_free_cached = self.pool.num_free_among(cached)
        if num_missing + num_spare_blocks > self.pool.num_free - num_free_cached:
            if may_share:
                next_name = table.chain.name(len(cached), tokens) if len(cached) < num_shareable else None
                num_held = len(cached) - num_free_cached
                table.failure = AllocationFailure(len(tokens), len(cached), num_held, next_name, self.pool.num_gains)
            return None
        table.failure = None
        self.pool.share(cached)  # first, or allocate might evict them
        table.append(cached)
        table.append(self.pool.allocate(num_missing))
        table.num_published = len(cached)
        if last is not None:
            table.coming = last
            self._coming[last] = num_shareable
        return len(cached) * self.block_size

    def extend(self, table: BlockTable, num_tokens: int) -> bool:
        """Make the table hold `num_tokens`; False, and nothing taken, when the pool has too few pages."""
        if num_tokens <= table.num_blocks * self.block_size:
            return True
        num_missing = self.num_blocks_for(num_tokens) - table.num_blocks
        if num_missing > self.pool.num_free:
            return False
        table.append(self.pool.allocate(num_missing))
        return True

    def extend_all(self, needs: Sequence[tuple[BlockTable, int]]) -> bool:
        """`extend` for every table and number of tokens, or for none."""
        num_missing = sum(max(0, self.num_blocks_for(tokens) - table.num_blocks) for table, tokens in needs)
        if num_missing > self.pool.num_free:
            return False
        return all(self.extend(table, num_tokens) for table, num_tokens in needs)

    def may_publish(self, table: BlockTable, num_computed: int) -> bool:
        """Whether `publish` has anything to do: once in `block_size` steps of a request."""
        return num_computed >= (table.num_published + 1) * self.block_size and self._enable_prefix_caching

    def publish(self, table: BlockTable, tokens: np.ndarray, num_computed: int) -> None:
        """Let other requests find the pages that the first `num_computed` tokens have filled."""
        if not self.may_publish(table, num_computed):
            return
        num_full = num_computed // self.block_size
        for index in range(table.num_published, num_full):
            self.pool.name(BlockId(int(table.row[index])), table.chain.name(index, tokens))
        table.num_published = num_full
        if table.coming is not None and num_full >= self._coming[table.coming]:
            self._has_come(table)

    def free(self, table: BlockTable) -> None:
        """Give all pages back; what was published can still be found until it is evicted."""
        self._has_come(table)
        self.pool.release(table.blocks)
        table.clear()

    def reset_prefix_cache(self) -> None:
        """Forget every published page that no request holds."""
        self.pool.forget_reusable()

    def _must_still_fail(self, table: BlockTable, num_tokens: int, num_spare_blocks: int) -> bool:
        """Whether the pool is too full for `table` even if every gain since its failure was one of its pages.

        Pages of its start count only where somebody holds them: free ones are taken from the free ones. And no more
        pages than then can be found as long as the first one that was missing is missing.
        """
        failure = table.failure
        if failure is None or failure.num_tokens != num_tokens:
            return False
        if failure.next_name is not None and self.pool.find(failure.next_name) is not None:
            return False
        num_held = min(failure.num_held + self.pool.num_gains - failure.num_gains, failure.num_cached)
        return self.num_blocks_for(num_tokens) - num_held + num_spare_blocks > self.pool.num_free

    def _has_come(self, table: BlockTable) -> None:
        """Nobody needs to wait for this table any more."""
        if table.coming is not None:
            del self._coming[table.coming]
            table.coming = None
