"""Pages and snapshots in the memory of the host."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
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

    The system provides the memory as pages are stored. They are copied without the lock, which the engine's thread takes: rows
    belong to no page until they are written, and a page is not evicted while it is read.
    """

    tier = "host"

    def __init__(self, layout: PageLayout, num_bytes: int, stats: TierStats) -> None:
        check_holds_each("--kv-offload-memory", num_bytes, layout, layout.row_bytes - layout.num_bytes)
        self._layout = layout
        self._stats = stats
        self._pieces = {each: _pieces(each, layout.row_bytes) for each in layout.all}
        self._arena = np.empty((num_bytes // layout.row_bytes, layout.row_bytes), np.uint8)
        self.max_pages = len(self._arena)
        self._free = _all_rows(self._arena)
        self._rows: OrderedDict[BlockHash, list[int]] = OrderedDict()
        """Rows of each page and snapshot, least recently used first."""
        self._read = Counter[BlockHash]()
        """Reads under way of pages and snapshots."""
        self._written: set[BlockHash] = set()
        """Pages and snapshots that are being written."""
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
                rows, arena = self._rows.get(name), self._arena
                if rows is None:
                    return count
                self._read[name] += 1
            for piece, stored in self._stored(name, rows, arena):
                page[piece.block][piece.first : piece.end] = stored
            with self._lock:
                self._read[name] -= 1
                if not self._read[name]:
                    del self._read[name]
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
            if name in self._rows or name in self._written:
                return
            rows, arena = self._take(-(-self._layout.of(name).num_bytes // self._layout.row_bytes)), self._arena
            if rows is None:
                return
            self._written.add(name)
        for piece, stored in self._stored(name, rows, arena):
            stored[:] = page[piece.block][piece.first : piece.end]
        with self._lock:
            self._written.remove(name)
            if arena is not self._arena:
                return  # cleared meanwhile
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

    def _take(self, count: int) -> list[int] | None:
        """Return so many rows, evicting what was not used for longest. None if all that is left is read or written."""
        while len(self._free) < count:
            old = next((name for name in self._rows if name not in self._read), None)
            if old is None:
                return None
            self._free += self._rows.pop(old)
            self._stats.evicted(self.tier, old)
        return [self._free.pop() for _ in range(count)]

    def _stored(self, name: BlockHash, rows: Sequence[int], arena: np.ndarray) -> list[tuple[_Piece, np.ndarray]]:
        """Return the pieces of a page or snapshot, and their memory in its rows."""
        pieces = self._pieces[self._layout.of(name)]
        return [(each, arena[rows[each.row], each.place :][: each.end - each.first]) for each in pieces]


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
