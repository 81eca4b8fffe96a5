"""The rows of embeddings on the device: who holds them, and which images they belong to."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True, eq=False)
class _Entry:
    """The rows of one image."""

    rows: np.ndarray
    num_holders: int


class EmbeddingRows:
    """The rows of embeddings on the device: who holds them, and which images they belong to."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """By digest, the one that was used the longest time ago first."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Rows of images that requests hold."""
        return sum(len(entry.rows) for entry in self._entries.values() if entry.num_holders)

    def hold(self, digest: bytes) -> np.ndarray | None:
        """Return the rows of an image, held once more; None if it has none."""
        entry = self._entries.get(digest)
        if entry is None:
            return None
        self._entries.move_to_end(digest)
        entry.num_holders += 1
        return entry.rows

    def take(self, digest: bytes, count: int) -> np.ndarray | None:
        """Return rows for an image that has none, held once; None, and nothing changes, if others hold too many."""
        idle = [each for each, entry in self._entries.items() if not entry.num_holders]
        if len(self._free) + sum(len(self._entries[each].rows) for each in idle) < count:
            return None
        for each in idle:
            if len(self._free) >= count:
                break
            self._free += self._entries.pop(each).rows.tolist()
        rows = np.array(self._free[len(self._free) - count :], np.int32)
        del self._free[len(self._free) - count :]
        self._entries[digest] = _Entry(rows, 1)
        return rows

    def release(self, digest: bytes) -> None:
        """Hold the rows of an image once less."""
        entry = self._entries.get(digest)
        if entry is not None:  # else the device has lost it
            entry.num_holders -= 1

    def num_holders(self, digest: bytes) -> int:
        """Return how often the rows of an image are held; 0 if it has none."""
        entry = self._entries.get(digest)
        return 0 if entry is None else entry.num_holders

    def drop(self, digest: bytes) -> None:
        """Forget an image that was not encoded to the end."""
        self._free += self._entries.pop(digest).rows.tolist()

    def forget(self) -> None:
        """Forget every image, held or not: the device has lost the rows."""
        for entry in self._entries.values():
            self._free += entry.rows.tolist()
        self._entries.clear()
