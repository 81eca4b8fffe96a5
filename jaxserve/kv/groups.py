"""The cache groups beside the first one: pages of sliding-window layers, and slots of recurrent states.

`KVManager` owns the pages of the groups that grow with the text, and asks this class for everything else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.kv.block_table import BlockTable
from jaxserve.kv.states import UNIT_TOKENS, RecurrentStates
from jaxserve.kv.windows import WindowPages
from jaxserve.types import BlockHash


class SideGroups:
    """Windows and states of one engine; a model with one kind of cache has neither."""

    def __init__(self, windows: Sequence[WindowPages] = (), states: Sequence[RecurrentStates] = ()) -> None:
        self.windows = tuple(windows)
        self.states = tuple(states)
        """State slots by data rank; none without recurrent layers."""

    @classmethod
    def of_sizes(
        cls,
        windows: Sequence[tuple[int, int]],
        num_state_slots: int,
        block_size: int,
        max_chunk: int,
        *,
        keeps_snapshots: bool,
        num_ranks: int = 1,
        unit_tokens: int = UNIT_TOKENS,
    ) -> SideGroups:
        """Return groups for windows (tokens, pages) and slots of recurrent states, 0 for none. max_chunk: prompt tokens of a
        step. num_ranks: data ranks that have an equal share of the slots each."""
        size = num_state_slots // num_ranks
        states = [
            RecurrentStates(size, block_size, rank=rank, keeps_snapshots=keeps_snapshots, unit_tokens=unit_tokens)
            for rank in range(num_ranks if num_state_slots else 0)
        ]
        return cls([WindowPages(count, block_size, window, max_chunk) for window, count in windows], states)

    @property
    def is_empty(self) -> bool:
        return not self.windows and not self.states

    def longest_prefix(self, table: BlockTable, tokens: np.ndarray, limit: int, rank: int) -> int:
        """Return the most pages, up to `limit`, that a request can share in all groups of a rank."""
        groups: list[WindowPages | RecurrentStates] = [*self.windows, *self.states[rank : rank + 1]]
        usable = [group.usable_prefixes(table.chain, tokens, limit) for group in groups]
        return max(count for count in range(limit + 1) if all(each[count] for each in usable))

    def has_state(self, table: BlockTable, tokens: np.ndarray, num_cached: int, rank: int) -> bool:
        """Return True if a request that shares `num_cached` pages of a rank gets a state slot there, or needs none."""
        return not self.states or self.states[rank].can_start(_last_hash(table, tokens, num_cached))

    def start(
        self, table: BlockTable, tokens: np.ndarray, num_cached: int, branch: int, num_spare: int, rank: int
    ) -> bool:
        """Start a request that shares `num_cached` pages of a rank; False, and takes nothing, if a group has no room.

        branch: tokens that it has in common with cached pages, whether it can share them or not. num_spare: pages that must
        stay free.
        """
        chain = table.chain
        if not all(pages.can_start(chain, tokens, num_cached, num_spare) for pages in self.windows):
            return False
        if not self.has_state(table, tokens, num_cached, rank):
            return False
        if self.states:
            self.states[rank].start(table.state, _last_hash(table, tokens, num_cached), len(tokens), branch)
        for pages, own in zip(self.windows, table.windows, strict=True):
            pages.start(own, chain, tokens, num_cached)
        return True

    def missing(self, table: BlockTable, num_tokens: int, num_computed: int | None) -> list[int]:
        """Return the pages of each window that a request of `num_tokens` needs and does not hold."""
        windows = zip(self.windows, table.windows, strict=True)
        return [pages.num_missing(own, num_tokens, num_computed) for pages, own in windows]

    def has_free(self, missing: Sequence[int]) -> bool:
        """Return True if so many pages of each window are free."""
        return all(count <= pages.pool.num_free for pages, count in zip(self.windows, missing, strict=True))

    def extend(self, table: BlockTable, missing: Sequence[int]) -> None:
        """Add pages, which must be free."""
        for pages, own, count in zip(self.windows, table.windows, missing, strict=True):
            pages.extend(own, count)

    def publish(self, table: BlockTable, tokens: np.ndarray, num_computed: int, hashes: Sequence[BlockHash]) -> None:
        """Cache the pages of these hashes, which follow the published ones; free the pages that a window has passed."""
        for pages, own in zip(self.windows, table.windows, strict=True):
            pages.publish(own, hashes, table.num_published)
            pages.slide(own, len(tokens), num_computed)
        if self.states:
            self.states[table.rank].publish(table, tokens, num_computed)

    def free(self, table: BlockTable) -> None:
        """Release pages and slots of a request; what is cached stays."""
        for pages, own in zip(self.windows, table.windows, strict=True):
            pages.free(own)
        if self.states:
            self.states[table.rank].free(table)

    def forget(self) -> None:
        """Forget the cached pages and the snapshots that no request holds."""
        for pages in self.windows:
            pages.pool.forget_evictable()
        for states in self.states:
            states.forget()


def _last_hash(table: BlockTable, tokens: np.ndarray, num_cached: int) -> BlockHash | None:
    """Return the hash of the last of these pages; None for none."""
    return table.chain.hash(num_cached - 1, tokens) if num_cached else None
