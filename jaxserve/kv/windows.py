"""Pages of sliding-window layers: a request keeps those inside the window, and frees each page that the window has passed.

    pages                              state
    0 ... first - 1                    freed: null entries of the table, never read again
    first ... end - 1                  held: at most `most` of them, reserved when the request starts
    end ...                            allocated as the window moves on

A freed page that was published stays cached until it is evicted. A prefix can be shared if every page inside the window
at its end is cached, whatever became of the pages before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.kv.block_pool import BlockPool
from jaxserve.kv.block_table import HashChain, WindowTable
from jaxserve.types import NULL_BLOCK, BlockHash, BlockId


class WindowPages:
    """The pages of all layers with one window."""

    def __init__(self, num_blocks: int, block_size: int, window: int, max_chunk: int) -> None:
        """max_chunk: prompt tokens of a step. Raises ValueError if the pages hold no window and two chunks."""
        self.pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._window = window
        self._max_chunk = max_chunk
        chunk = -(-max_chunk // block_size)
        self._most = -(-window // block_size) + 2 + 2 * chunk  # one chunk in flight, one to come
        if self._most > self.pool.num_usable:
            raise ValueError(f"{num_blocks} pages hold no window of {window} tokens and two chunks of {max_chunk}")

    def usable_prefixes(self, chain: HashChain, tokens: np.ndarray, limit: int) -> list[bool]:
        """Return, for 0 to `limit` pages, whether a prefix of so many pages has its window's pages in the cache."""
        usable, run = [True], 0
        for count in range(1, limit + 1):
            run = run + 1 if self.pool.find(chain.hash(count - 1, tokens)) is not None else 0
            usable.append(run >= count - self._first_needed(count * self._block_size))
        return usable

    def can_start(self, chain: HashChain, tokens: np.ndarray, num_cached: int, num_spare: int) -> bool:
        """Return True if a request that shares `num_cached` pages gets its pages, and `num_spare` stay free."""
        shared = self._shared(chain, tokens, num_cached)
        return self._num_own(tokens, num_cached, shared) + num_spare <= self.pool.num_free - self.pool.num_free_among(
            shared
        )

    def start(self, table: WindowTable, chain: HashChain, tokens: np.ndarray, num_cached: int) -> None:
        """Give `table` the window's pages of a shared prefix, and pages to compute with. `can_start` must be True."""
        shared = self._shared(chain, tokens, num_cached)
        self.pool.share(shared)
        own = self.pool.allocate(self._num_own(tokens, num_cached, shared))
        table.first, table.end = num_cached - len(shared), num_cached
        table.entries[table.first : table.end] = shared
        table.append(own)

    def num_missing(self, table: WindowTable, num_tokens: int, num_computed: int | None) -> int:
        """Return the pages to add before the next chunk; num_computed: None if all tokens but the new ones are computed."""
        if num_computed is not None:
            num_tokens = min(num_tokens, num_computed + self._max_chunk)
        return max(0, -(-num_tokens // self._block_size) - table.end)

    def extend(self, table: WindowTable, count: int) -> None:
        """Add pages, which must be free."""
        table.append(self.pool.allocate(count))

    def publish(self, table: WindowTable, hashes: Sequence[BlockHash], first: int) -> None:
        """Cache full pages: `hashes` are those of the pages from `first` on. Pages that are not held are left out."""
        for index, block_hash in enumerate(hashes, first):
            if table.first <= index < table.end:
                self.pool.cache(BlockId(int(table.entries[index])), block_hash)

    def slide(self, table: WindowTable, num_tokens: int, num_computed: int) -> None:
        """Free the pages that no token after the first `num_computed` attends to.

        A prompt of `num_tokens` that is still computed gets as many pages ahead, so that it always holds the pages that
        it got at its start.
        """
        first = min(self._first_needed(num_computed), table.end)
        if first > table.first:
            passed = table.entries[table.first : first].tolist()
            table.entries[table.first : first] = NULL_BLOCK
            table.first = first
            self.pool.release(passed)
            ahead = min(-(-num_tokens // self._block_size), first + self._most) - table.end
            self.extend(table, max(0, min(ahead, self.pool.num_free)))

    def free(self, table: WindowTable) -> None:
        """Release all pages."""
        self.pool.release([BlockId(block) for block in table.entries[table.first : table.end].tolist()])
        table.clear()

    def _first_needed(self, num_computed: int) -> int:
        """Return the first page that the token after the first `num_computed` attends to."""
        return max(0, num_computed - self._window + 1) // self._block_size

    def _shared(self, chain: HashChain, tokens: np.ndarray, num_cached: int) -> list[BlockId]:
        first = self._first_needed(num_cached * self._block_size)
        found = [self.pool.find(chain.hash(index, tokens)) for index in range(first, num_cached)]
        assert None not in found, "the prefix is usable"
        return [block for block in found if block is not None]

    def _num_own(self, tokens: np.ndarray, num_cached: int, shared: Sequence[BlockId]) -> int:
        return min(-(-len(tokens) // self._block_size) - num_cached, self._most - len(shared))
