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

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from jaxserve.kv.block_pool import BlockPool
from jaxserve.kv.block_table import AllocationFailure, BlockTable, HashChain
from jaxserve.kv.groups import SideGroups
from jaxserve.kv.page_changes import PageChanges
from jaxserve.kv.prefix import MissingPrefix
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
        num_ranks: int = 1,
        groups: SideGroups | None = None,
        chains: Callable[[str | None, int, Sequence[tuple[int, int, bytes]]], HashChain] | None = None,
    ) -> None:
        """changes: records the pages that the prefix cache gains and loses; None: they are not recorded. chains: makes the
        page hashes of a request from its salt, adapter and images; None: from its tokens.

        num_ranks: data ranks that have an equal share of the pages each. groups: windows and recurrent states; a prefix is
        shared only as far as the window's pages are cached, and up to a snapshot of the state.
        """
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, changes, num_ranks=num_ranks)
        self.num_blocks = num_blocks
        """Pages of the pool, the null pages included."""
        self.max_blocks = self.num_blocks_for(max_model_len)
        """Pages of one page table."""
        self._enable_prefix_caching = enable_prefix_caching
        self.groups = SideGroups() if groups is None else groups
        """Windows and recurrent states."""
        self._chains = chains or partial(HashChain, block_size)
        self.weights_name: str | None = None
        """Gives the pages of new tables hashes of their own, for weights of this name; None: those of the start."""
        self.on_publish: Callable[[BlockHash], None] | None = None
        """Called with the hash of each page that becomes full and cached."""
        self.on_free: Callable[[Sequence[BlockHash]], None] | None = None
        """Called with the hashes of a request's published pages, in their order, when it gives them up."""
        self._pending: dict[BlockHash, int] = {}
        """The last shareable page of each prompt that is being computed, and the number of shareable pages; see
        `BlockTable.pending`."""

    @property
    def num_usable_tokens(self) -> int:
        """Tokens that a single request could hold."""
        return self.pool.num_usable_by_one * self.block_size

    @property
    def usage(self) -> float:
        """Share of the pages that requests hold."""
        return 1.0 - self.pool.num_free / self.pool.num_usable

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def new_table(
        self, cache_salt: str | None, adapter: int = 0, images: Sequence[tuple[int, int, bytes]] = ()
    ) -> BlockTable:
        """Return an empty table for a new request of this adapter; images: as in `HashChain`."""
        table = BlockTable(self.max_blocks, self._chains(cache_salt, adapter, images), len(self.groups.windows))
        if self.weights_name is not None:
            table.name_weights(self.weights_name)
        return table

    def find_prefix(self, table: BlockTable, tokens: np.ndarray, rank: int = 0) -> list[BlockId]:
        """Return the cached pages of a rank that a request with `tokens` can share. Changes nothing."""
        if not self._enable_prefix_caching:
            return []
        blocks = _cached_pages(self.pool, table, tokens[: (len(tokens) - 1) // self.block_size * self.block_size], rank)
        return (
            blocks if self.groups.is_empty else blocks[: self.groups.longest_prefix(table, tokens, len(blocks), rank)]
        )

    def missing_prefix(
        self,
        table: BlockTable,
        tokens: np.ndarray,
        *,
        num_spare_blocks: int = 0,
        num_awaited: Callable[[int], int] = lambda rank: 0,
    ) -> MissingPrefix | None:
        """Return what a start with `tokens` could share on the rank that it would choose, and what is missing there.

        Returns None if nothing is, or if `start` would fail. num_awaited: returns the pages of a rank that requests will take once
        their prefix is fetched.
        """
        num_shareable = (len(tokens) - 1) // self.block_size if self._enable_prefix_caching else 0
        num_wanted = self.num_blocks_for(len(tokens)) + -(-num_spare_blocks // self.pool.num_ranks)
        if not num_shareable or _must_still_fail(self.pool, table, len(tokens), num_wanted):
            return None
        if table.chain.hash(num_shareable - 1, tokens) in self._pending:
            return None
        usable = [self.find_prefix(table, tokens, rank) for rank in range(self.pool.num_ranks)]
        has_state = partial(self.groups.has_state, table, tokens)
        rank = _choose_rank(self.pool, usable, num_wanted, has_state, num_awaited)
        if len(usable[rank]) == num_shareable:
            return None
        cached = _cached_pages(self.pool, table, tokens[: num_shareable * self.block_size], rank)
        if not _has_pages(self.pool, rank, cached, num_wanted):
            return None
        hashes = [table.chain.hash(index, tokens) for index in range(num_shareable)]
        if not self.groups.states:
            return MissingPrefix(hashes, len(cached), rank)
        states, num_usable = self.groups.states[rank], len(usable[rank])
        unit = states.unit // self.block_size
        ends = range(num_shareable // unit * unit, num_usable, -unit)
        if not ends or states.num_free < 2:  # for the snapshot, and for the request
            return None
        kept = frozenset(end for end in ends if hashes[end - 1] in states.snapshots)
        return MissingPrefix(hashes, len(cached), rank, ends, num_usable, kept)

    def start(
        self, table: BlockTable, tokens: np.ndarray, *, num_spare_blocks: int = 0, may_share: bool = True
    ) -> int | None:
        """Give `table` pages for all `tokens`, cached ones first; returns the number of cached tokens.

        The pages are those of the rank that has most of the cached ones that can be shared; of these ranks, of the one with most
        free pages.
        Returns None, and takes nothing, if the pool cannot hold all of them now and leave `num_spare_blocks` free, or if
        another table is about to publish the same pages. Pages for all tokens at once keep a request from being
        preempted in the middle of its prompt. A failed call may be repeated at every step: its cost does not grow with
        the prompt until the pool has changed enough.

        may_share: False for a request that computes all of its pages, cached or not.
        """
        num_shareable = (len(tokens) - 1) // self.block_size if self._enable_prefix_caching else 0
        last = table.chain.hash(num_shareable - 1, tokens) if num_shareable else None
        num_wanted = self.num_blocks_for(len(tokens)) + -(-num_spare_blocks // self.pool.num_ranks)
        if may_share and (last in self._pending or _must_still_fail(self.pool, table, len(tokens), num_wanted)):
            return None
        found = [self.find_prefix(table, tokens, rank) if may_share else [] for rank in range(self.pool.num_ranks)]
        rank = _choose_rank(self.pool, found, num_wanted, partial(self.groups.has_state, table, tokens))
        cached = found[rank]
        if len(cached) == num_shareable or last in self._pending:
            last = None
        num_missing = self.num_blocks_for(len(tokens)) - len(cached)
        if not _has_pages(self.pool, rank, cached, num_wanted):
            if may_share and self.pool.num_ranks == 1:
                next_hash = table.chain.hash(len(cached), tokens) if len(cached) < num_shareable else None
                num_held = len(cached) - self.pool.num_free_among(cached)
                table.failure = AllocationFailure(len(tokens), len(cached), num_held, next_hash, self.pool.num_gains)
            return None
        if not self.groups.is_empty:
            num_common = len(_cached_pages(self.pool, table, tokens, rank)) if num_shareable else 0
            branch = max(num_common, table.num_found) * self.block_size
            if not self.groups.start(table, tokens, len(cached), branch, num_spare_blocks, rank):
                return None
        table.failure = None
        self.pool.share(cached)  # first, or allocate might evict them
        table.append(cached)
        table.append(self.pool.allocate(num_missing, rank))
        table.rank = rank
        table.num_published = len(cached)
        if last is not None:
            table.pending = last
            self._pending[last] = num_shareable
        return len(cached) * self.block_size

    def extend(self, table: BlockTable, num_tokens: int, num_computed: int | None = None) -> bool:
        """Make the table hold `num_tokens`. Returns False, and takes nothing, if a pool has too few pages.

        num_computed: tokens that are computed or in a step in flight; windows get pages for the next chunk after them. None:
        windows get pages for all tokens.
        """
        if num_tokens <= table.num_blocks * self.block_size and not self.groups.windows:
            return True  # at nearly every decode step
        in_windows = self.groups.missing(table, num_tokens, num_computed)
        if not self.groups.has_free(in_windows):
            return False
        num_missing = self.num_blocks_for(num_tokens) - table.num_blocks
        if num_missing > 0:
            if num_missing > self.pool.num_free_of(table.rank):
                return False
            table.append(self.pool.allocate(num_missing, table.rank))
        self.groups.extend(table, in_windows)
        return True

    def extend_all(self, needs: Sequence[tuple[BlockTable, int]]) -> bool:
        """Extend every table to its number of tokens, or none."""
        num_missing = [0] * self.pool.num_ranks
        for table, tokens in needs:
            num_missing[table.rank] += max(0, self.num_blocks_for(tokens) - table.num_blocks)
        if any(count > self.pool.num_free_of(rank) for rank, count in enumerate(num_missing)):
            return False
        if self.groups.windows:
            in_windows = [self.groups.missing(table, tokens, None) for table, tokens in needs]
            if not self.groups.has_free([sum(counts) for counts in zip(*in_windows, strict=True)]):
                return False
        return all(self.extend(table, num_tokens) for table, num_tokens in needs)

    def may_publish(self, table: BlockTable, num_computed: int) -> bool:
        """Return True if `publish` has full pages to publish or to free: once in `block_size` steps of a request."""
        has_full = num_computed >= (table.num_published + 1) * self.block_size
        return has_full and (self._enable_prefix_caching or bool(self.groups.windows))

    def publish(self, table: BlockTable, tokens: np.ndarray, num_computed: int) -> None:
        """Cache the pages that the first `num_computed` tokens have filled, and free those that a window has passed."""
        if not self.may_publish(table, num_computed):
            return
        num_full = num_computed // self.block_size
        indices = range(table.num_published, num_full if self._enable_prefix_caching else 0)
        hashes = [table.chain.hash(index, tokens) for index in indices]
        for index, block_hash in zip(indices, hashes, strict=True):
            self.pool.cache(BlockId(int(table.row[index])), block_hash)
            if self.on_publish is not None:
                self.on_publish(block_hash)
        self.groups.publish(table, tokens, num_computed, hashes)
        table.num_published = num_full
        if table.pending is not None and num_full >= self._pending[table.pending]:
            self._drop_pending(table)

    def free(self, table: BlockTable) -> None:
        """Release all pages; published ones stay cached until they are evicted."""
        self._drop_pending(table)
        if self.on_free is not None and table.num_published:
            self.on_free(table.chain.known[: table.num_published])
        self.pool.release(table.blocks)
        self.groups.free(table)
        table.clear()

    def reset_prefix_cache(self) -> None:
        """Forget every published page that no request holds."""
        self.pool.forget_evictable()
        self.groups.forget()

    def _drop_pending(self, table: BlockTable) -> None:
        """Let other requests start that waited for the pages of this table."""
        if table.pending is not None:
            del self._pending[table.pending]
            table.pending = None


def name_weights(name: str, kv: KVManager, tables: Iterable[BlockTable]) -> None:
    """Give the pages of new tables, and of these empty ones, hashes of their own, for weights of this name."""
    kv.weights_name = name
    for table in tables:
        table.name_weights(name)


def _cached_pages(pool: BlockPool, table: BlockTable, tokens: np.ndarray, rank: int) -> list[BlockId]:
    """Return the cached pages of a rank that `tokens` start with."""
    blocks: list[BlockId] = []
    for index in range(table.chain.num_full(tokens)):
        block = pool.find(table.chain.hash(index, tokens), rank)
        if block is None:
            break
        blocks.append(block)
    return blocks


def _must_still_fail(pool: BlockPool, table: BlockTable, num_tokens: int, num_wanted: int) -> bool:
    """Return True if `pool` is too full for `table` even if every gain since its failure was one of its pages.

    num_wanted: pages for all of its tokens, and those that must stay free.

    Cached pages count only if a request holds them: the others are taken from the free ones. No more pages than at
    the failure are cached as long as the first one that was missing is missing.
    """
    failure = table.failure
    if failure is None or failure.num_tokens != num_tokens:
        return False
    if failure.next_hash is not None and pool.find(failure.next_hash) is not None:
        return False
    num_held = min(failure.num_held + pool.num_gains - failure.num_gains, failure.num_cached)
    return num_wanted - num_held > pool.num_free


def _choose_rank(
    pool: BlockPool,
    found: Sequence[Sequence[BlockId]],
    num_wanted: int,
    has_state: Callable[[int, int], bool],
    num_awaited: Callable[[int], int] = lambda rank: 0,
) -> int:
    """Return the rank for a request that wants so many pages; one that has too few, or no state slot, only if all have.

    found: the request's cached pages on each rank. has_state: returns True if there is a state slot for a request that shares so
    many pages of a rank. num_awaited: returns the pages of a rank that other requests will take soon.
    """

    def preference(rank: int) -> tuple[bool, int, int]:
        has_room = _has_pages(pool, rank, found[rank], num_wanted) and has_state(len(found[rank]), rank)
        return has_room, len(found[rank]), pool.num_free_of(rank) - num_awaited(rank)

    return 0 if len(found) == 1 else max(range(len(found)), key=preference)


def _has_pages(pool: BlockPool, rank: int, cached: Sequence[BlockId], num_wanted: int) -> bool:
    """Return True if the rank has so many pages for a request, those that are cached there among them."""
    return num_wanted - len(cached) <= pool.num_free_of(rank) - pool.num_free_among(cached)
