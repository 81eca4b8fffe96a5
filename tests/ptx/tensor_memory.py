"""Tensor memory of a block, and who may touch it when.

Modelled, from the PTX ISA ("Tensor Memory", "tcgen05 Memory Consistency Model"): 128 lanes of 512 columns of 32 bits, of
which warp w reaches lanes 32 (w mod 4) to 32 (w mod 4) + 31; allocation of a power of two of columns, once, and its end.

- Loads and stores of threads are done when their warp waits for them (`tcgen05.wait`): until then the columns that are
  loaded must not be written, and those that are stored not be used. The loaded registers can be used at once: the
  assembler knows these dependencies, on which Mosaic GPU relies.
- Only matmuls into the same columns, of one shape, are done in order. What another one reads or writes must not be written,
  nor what it writes be read, before it is done.
- What threads have touched is seen by matmuls, and by other warps, after `tcgen05.fence::before_thread_sync` of these
  threads and `tcgen05.fence::after_thread_sync` of the warp that issues the matmul; what a matmul has touched after the
  latter fence of the threads.

Not modelled: a second allocation, loads and stores of other shapes than 32x32b (refused).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tests.ptx.hazards import Hazard, NotModelled

LANES, COLUMNS = 128, 512
_QUARTERS, _QUARTER = 4, 32
_UNWRITTEN = 0xFFFFFFFF
_FEWEST = 32
Words = npt.NDArray[np.uint32]
_Marks = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Columns:
    """Columns [first, end)."""

    first: int
    end: int

    def overlap(self, other: Columns | None) -> bool:
        return other is not None and self.first < other.end and other.first < self.end

    @property
    def slice(self) -> slice:
        return slice(self.first, self.end)


@dataclass
class Use:
    """A matmul that was issued: the columns of its sums, those of A if it is here, and its shape."""

    sums: Columns
    a: Columns | None
    shape: tuple[int, ...]

    @property
    def pipeline(self) -> tuple[int, ...]:
        """Matmuls of one pipeline are done in order."""
        return self.sums.first, *self.shape


def _marks(rows: int) -> _Marks:
    return np.zeros((rows, COLUMNS), np.int32)


@dataclass
class _ByThreads:
    """Loads or stores of threads, by quarter of the lanes and column."""

    pending: _Marks = field(default_factory=lambda: _marks(_QUARTERS))
    unfenced: _Marks = field(default_factory=lambda: _marks(_QUARTERS))
    """The warp that did it since its last fence, counted from 1, or 0."""
    fenced: _Marks = field(default_factory=lambda: _marks(_QUARTERS))
    """When the fence came."""
    of_warps: dict[int, list[Columns]] = field(default_factory=lambda: defaultdict(list))

    def begin(self, warp: int, columns: Columns) -> None:
        self.pending[warp % _QUARTERS, columns.slice] += 1
        self.unfenced[warp % _QUARTERS, columns.slice] = warp + 1
        self.of_warps[warp].append(columns)

    def wait(self, warp: int) -> None:
        for columns in self.of_warps.pop(warp, []):
            self.pending[warp % _QUARTERS, columns.slice] -= 1

    def fence(self, warp: int, now: int) -> None:
        """Show what was waited for to those who fence later."""
        done = (self.unfenced == warp + 1) & (self.pending == 0)
        self.unfenced[done], self.fenced[done] = 0, now

    def check(self, columns: Columns, seen: int, what: str) -> None:
        """Check that a matmul may follow. Raises Hazard."""
        if self.pending[:, columns.slice].any():
            raise Hazard(f"a matmul uses tensor memory whose {what} was not waited for")
        if self.unfenced[:, columns.slice].any():
            raise Hazard(f"a matmul uses tensor memory whose {what} was not fenced (before_thread_sync)")
        if (self.fenced[:, columns.slice] > seen).any():
            raise Hazard(f"a matmul uses tensor memory whose {what} it has not seen (after_thread_sync)")


class TensorMemory:
    """The tensor memory of one block."""

    def __init__(self) -> None:
        self._data = np.full((LANES, COLUMNS), _UNWRITTEN, np.uint32)
        self._num_columns = 0
        self._now = 0
        """Counts fences of threads and matmuls that are done."""
        self._seen: dict[int, int] = defaultdict(int)
        """When a warp last fenced after a synchronisation."""
        self._loads, self._stores = _ByThreads(), _ByThreads()
        self._uses: list[Use] = []
        """Matmuls that are not done."""
        self._summed, self._taken = _marks(1)[0], _marks(1)[0]
        """When a matmul last wrote a column, and read it."""
        self._pipelines: dict[int, tuple[int, ...]] = {}
        """Pipeline of the matmul that last wrote a column."""

    @property
    def is_allocated(self) -> bool:
        return self._num_columns > 0

    def allocate(self, num_columns: int) -> int:
        """Return the address."""
        if self._num_columns:
            raise NotModelled("a second allocation of tensor memory")
        if num_columns.bit_count() != 1 or not _FEWEST <= num_columns <= COLUMNS:
            raise Hazard(f"an allocation of {num_columns} columns of tensor memory")
        self._num_columns = num_columns
        return 0

    def free(self, address: int, num_columns: int) -> None:
        if (address, num_columns) != (0, self._num_columns):
            raise Hazard(f"{num_columns} columns of tensor memory at {address:#x} are freed: not those allocated")
        if self._uses or self._loads.pending.any() or self._stores.pending.any():
            raise Hazard("tensor memory is freed while it is used")
        self._num_columns = 0

    def columns(self, address: int, count: int) -> Columns:
        """Return the columns at an address of lane 0. Raises Hazard."""
        if address >> 16:
            raise NotModelled(f"an address in tensor memory with a lane: {address:#x}")
        if address + count > self._num_columns:
            raise Hazard(f"columns {address} to {address + count} of tensor memory: {self._num_columns} are allocated")
        return Columns(address, address + count)

    def load(self, warp: int, columns: Columns) -> Words:
        """By the threads of a warp: a row for each."""
        self._check_threads(warp, columns, is_store=False)
        self._loads.begin(warp, columns)
        return self._data[self._lanes(warp), columns.slice].copy()

    def store(self, warp: int, columns: Columns, words: Words) -> None:
        """By the threads of a warp: a row of each."""
        self._check_threads(warp, columns, is_store=True)
        self._stores.begin(warp, columns)
        self._data[self._lanes(warp), columns.slice] = words

    def wait_loads(self, warp: int) -> None:
        self._loads.wait(warp)

    def wait_stores(self, warp: int) -> None:
        self._stores.wait(warp)

    def fence_before(self, warp: int) -> None:
        """Order what the warp has done before a synchronisation that follows."""
        self._now += 1
        for each in (self._loads, self._stores):
            each.fence(warp, self._now)

    def fence_after(self, warp: int) -> None:
        """Order what the warp will do after a synchronisation that came before."""
        self._seen[warp] = self._now

    def issue(self, warp: int, use: Use) -> None:
        """Begin a matmul. Raises Hazard."""
        for other in self._uses:
            if other.pipeline != use.pipeline and self._conflict(use, other):
                raise Hazard("a matmul uses tensor memory of another one that is not done and may be done later")
        seen = self._seen[warp]
        for columns in filter(None, (use.sums, use.a)):
            self._stores.check(columns, seen, "store")
            is_own = all(self._pipelines.get(i) == use.pipeline for i in range(columns.first, columns.end))
            if (self._summed[columns.slice] > seen).any() and not is_own:
                raise Hazard(
                    "a matmul uses tensor memory of another one, and did not fence after it (after_thread_sync)"
                )
        self._loads.check(use.sums, seen, "load")
        if (self._taken[use.sums.slice] > seen).any():
            raise Hazard("a matmul writes what another one has read, and did not fence after it (after_thread_sync)")
        self._uses.append(use)

    def finish(self, use: Use, rows: npt.NDArray[np.float32], *, is_added: bool) -> None:
        """A matmul's result arrives: numbers of (lanes, columns)."""
        before = self._data[:, use.sums.slice].view(np.float32)
        total = before + rows if is_added else rows
        self._data[:, use.sums.slice] = np.ascontiguousarray(total, np.float32).view(np.uint32)
        self._uses.remove(use)
        self._now += 1
        self._summed[use.sums.slice] = self._now
        self._pipelines.update(dict.fromkeys(range(use.sums.first, use.sums.end), use.pipeline))
        if use.a is not None:
            self._taken[use.a.slice] = self._now

    def matrix(self, columns: Columns) -> Words:
        """A of a matmul that is done now."""
        return self._data[:, columns.slice].copy()

    def _check_threads(self, warp: int, columns: Columns, *, is_store: bool) -> None:
        name = "written" if is_store else "read"
        for use in self._uses:
            if columns.overlap(use.sums) or (is_store and columns.overlap(use.a)):
                raise Hazard(f"tensor memory is {name} by threads while a matmul uses it")
        marks = [self._summed, self._taken] if is_store else [self._summed]
        if any((each[columns.slice] > self._seen[warp]).any() for each in marks):
            raise Hazard(f"tensor memory is {name} by threads that did not fence after the matmul (after_thread_sync)")
        own = warp % _QUARTERS, columns.slice
        if self._stores.pending[own].any() or (is_store and self._loads.pending[own].any()):
            raise Hazard(f"tensor memory is {name} by threads before they waited for its last load or store")
        for each in [self._stores, self._loads] if is_store else [self._stores]:
            if np.isin(each.unfenced[own], (0, warp + 1), invert=True).any():
                raise Hazard(f"tensor memory is {name} by threads while those of another warp use it")

    @staticmethod
    def _conflict(use: Use, other: Use) -> bool:
        overlaps = (use.sums.overlap(other.sums), use.sums.overlap(other.a), other.sums.overlap(use.a))
        return any(overlaps)

    @staticmethod
    def _lanes(warp: int) -> slice:
        first = warp % _QUARTERS * _QUARTER
        return slice(first, first + _QUARTER)
