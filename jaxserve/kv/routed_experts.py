"""The experts that computed tokens chose, kept on the host beside the KV pages of the tokens.

A page's experts are written when its tokens are computed, and go with it: a request that shares cached pages finds there what
the tokens chose when they were computed. So a request takes pages from the prefix cache and still gets the experts of its
whole prompt.
"""

from __future__ import annotations

import numpy as np

from jaxserve.kv.block_table import BlockTable
from jaxserve.kv.manager import KVManager
from jaxserve.types import NULL_BLOCK


class RequestExperts:
    """Progress of one request: the tokens whose experts were sent. Those that a preemption has computed again are not sent again."""

    __slots__ = ("num_sent",)

    def __init__(self) -> None:
        self.num_sent = 0


class PageExperts:
    """The experts of the tokens of every page, L layers and k experts each. A page takes memory from its first write on."""

    def __init__(self, kv: KVManager, shape: tuple[int, int], dtype: np.dtype[np.unsignedinteger]) -> None:
        """shape: L and k."""
        self._block_size = kv.block_size
        self._max_pages = kv.max_blocks
        self._pages = np.zeros((kv.num_blocks, kv.block_size, *shape), dtype)

    def write(self, tables: np.ndarray, positions: np.ndarray, experts: np.ndarray) -> None:
        """Keep experts `[K, T, L, k]` of T tokens of K steps, whose positions are `[K, T]` and page tables `[T, M]`.

        Positions without a page go to the null page.
        """
        pages, places = np.divmod(positions, self._block_size)
        blocks = tables[np.arange(len(tables)), np.minimum(pages, self._max_pages - 1)]
        self._pages[np.where(pages < self._max_pages, blocks, NULL_BLOCK), places] = experts

    def take(self, request: RequestExperts, table: BlockTable, num_computed: int) -> bytes | None:
        """Return the experts of the first `num_computed` tokens that were not sent, `[tokens, L, k]`; None if all were."""
        start = request.num_sent
        if num_computed <= start:
            return None
        request.num_sent = num_computed
        first, last = start // self._block_size, -(-num_computed // self._block_size)
        tokens = self._pages[table.row[first:last]].reshape(-1, *self._pages.shape[2:])
        return tokens[start - first * self._block_size : num_computed - first * self._block_size].tobytes()
