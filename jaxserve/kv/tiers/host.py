"""Pages and snapshots in the memory of the host."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.kv.tiers.page import Page, PageLayout, check_holds_each
from jaxserve.kv.tiers.stats import TierStats
from jaxserve.types import BlockHash


class _Piece(NamedTuple):
    """A part of one block that lies in one row."""

    block: int
    first: int
    end: int
    """Bytes of the block."""
    row: int
    """Number of the row, of those that the page or snapshot has."""
    place: int
    """First byte in the row."""


class HostStore:
    """A fixed number of rows in one allocation. A page takes one row, a snapshot as many as it needs; the least recently used of
    both makes place for a new one.

    The system provides the memory as pages are stored. They are copied under a lock, so that none is evicted while it
    is read.
    """

    tier = "host"

    def __init__(self, layout: PageLayout, num_bytes: int, stats: TierStats) -> None:
        check_holds_each("--kv-offload-memory", num_bytes, layout)
        self._layout = layout
        self._stats = stats
        self._pieces = {each: _pieces(each, layout.num_bytes) for each in layout.all}
        self._arena = np.empty((num_bytes // layout.num_bytes, layout.num_bytes), np.uint8)
        self.max_pages = len(self._arena)
        self._free = _all_rows(self._arena)
        self._rows: OrderedDict[BlockHash, list[int]] = OrderedDict()
        """Rows of each page and snapshot, least recently used first."""
        self._lock = threading.Lock()

    def num_leading(self, names: Sequence[BlockHash]) -> int:
        with self._lock:
            return next((i for i, name in enumerate(names) if name not in self._rows), len(names))

    def find_first(self, names: Sequence[BlockHash]) -> int | None:
        with self._lock:
            return next((i for i, name in enumerate(names) if name in self._rows), None)

    def get(self, names: Sequence[BlockHash], pages: Sequence[Page]) -> int:
        for count, (name, page) in enumerate(zip(names, pages, strict=True)):
            with self._lock:
                rows = self._rows.get(name)
                if rows is None:
                    return count
                for piece, stored in self._stored(name, rows):
                    page[piece.block][piece.first : piece.end] = stored
        return len(names)

    def touch(self, names: Collection[BlockHash]) -> list[BlockHash]:
        with self._lock:
            missing = [name for name in names if name not in self._rows]
            for name in names:
                if name in self._rows:
                    self._rows.move_to_end(name)
        return missing

    def put(self, name: BlockHash, page: Page) -> None:
        with self._lock:
            if name in self._rows:
                return
            rows = self._take(-(-self._layout.of(name).num_bytes // self._layout.num_bytes))
            for piece, stored in self._stored(name, rows):
                stored[:] = page[piece.block][piece.first : piece.end]
            self._rows[name] = rows
        self._stats.stored(self.tier, name, self._layout.of(name).num_bytes)

    def clear(self) -> None:
        """Forget every page, and give their memory back."""
        with self._lock:
            self._rows.clear()
            self._arena = np.empty(self._arena.shape, np.uint8)  # memory comes when rows are written
            self._free = _all_rows(self._arena)

    def close(self) -> None:
        """There is nothing to release."""

    def _take(self, count: int) -> list[int]:
        """Return so many rows, evicting what was not used for longest."""
        while len(self._free) < count:
            old, rows = self._rows.popitem(last=False)
            self._free += rows
            self._stats.evicted(self.tier, old)
        return [self._free.pop() for _ in range(count)]

    def _stored(self, name: BlockHash, rows: Sequence[int]) -> list[tuple[_Piece, np.ndarray]]:
        """Return the pieces of a page or snapshot, and their memory in its rows."""
        pieces = self._pieces[self._layout.of(name)]
        return [(each, self._arena[rows[each.row], each.place :][: each.end - each.first]) for each in pieces]


def _all_rows(arena: np.ndarray) -> list[int]:
    """Return the numbers of all rows, the first one last: it is taken first."""
    return list(range(len(arena) - 1, -1, -1))


def _pieces(layout: PageLayout, row_bytes: int) -> list[_Piece]:
    """Return the pieces of a page or snapshot whose blocks lie one after the other in rows of so many bytes."""
    pieces, place = list[_Piece](), 0
    for index, block in enumerate(layout.blocks):
        first = 0
        while first < block.num_bytes:
            row, offset = divmod(place, row_bytes)
            count = min(block.num_bytes - first, row_bytes - offset)
            pieces.append(_Piece(index, first, first + count, row, offset))
            first, place = first + count, place + count
    return pieces
