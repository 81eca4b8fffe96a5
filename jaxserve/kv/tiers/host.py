"""Pages in the memory of the host."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.kv.tiers.page import Page, PageLayout, copy_page
from jaxserve.kv.tiers.stats import TierStats
from jaxserve.types import BlockHash


class HostStore:
    """A fixed number of pages in one allocation; the least recently used one makes place for a new one.

    The system provides the memory as pages are stored. Pages are copied under a lock, so that none is evicted while it
    is read.
    """

    tier = "host"

    def __init__(self, layout: PageLayout, num_bytes: int, stats: TierStats) -> None:
        capacity = num_bytes // layout.num_bytes
        if capacity < 1:
            raise ConfigError(
                f"--kv-offload-memory of {num_bytes} bytes is too small: one KV page takes {layout.num_bytes} bytes"
            )
        self._layout = layout
        self._stats = stats
        self._arena = np.empty((capacity, layout.num_bytes), np.uint8)
        self._rows: OrderedDict[BlockHash, int] = OrderedDict()
        """Row of each page, least recently used first."""
        self._lock = threading.Lock()

    @property
    def capacity(self) -> int:
        """Pages that fit."""
        return len(self._arena)

    def num_leading(self, hashes: Sequence[BlockHash]) -> int:
        with self._lock:
            return next((i for i, block_hash in enumerate(hashes) if block_hash not in self._rows), len(hashes))

    def get(self, hashes: Sequence[BlockHash], pages: Sequence[Page]) -> int:
        for count, (block_hash, page) in enumerate(zip(hashes, pages, strict=True)):
            with self._lock:
                row = self._rows.get(block_hash)
                if row is None:
                    return count
                self._rows.move_to_end(block_hash)
                copy_page(self._layout.views(self._arena[row]), page)
        return len(hashes)

    def put(self, block_hash: BlockHash, page: Page) -> None:
        with self._lock:
            if block_hash in self._rows:
                self._rows.move_to_end(block_hash)
                return
            row = len(self._rows)
            if row == self.capacity:
                old, row = self._rows.popitem(last=False)
                self._stats.evicted(self.tier, old)
            copy_page(page, self._layout.views(self._arena[row]))
            self._rows[block_hash] = row
        self._stats.stored(self.tier, self._layout.num_bytes)

    def clear(self) -> None:
        with self._lock:
            self._rows.clear()

    def close(self) -> None:
        """There is nothing to release."""
