"""Memory of the emulated device: bounds, alignment, unwritten numbers, and the proxies that see shared memory.

Modelled, from the PTX ISA ("State Spaces", "Memory Consistency Model: Proxies", "Tensor Swizzling Modes"):

- every access lies within one array, or within the shared memory of the block, and is aligned to its size;
- unwritten memory reads as ones in every bit, which is NaN in all types of floats;
- results are written once, operands never; what is updated in place is written once, and not read after that;
- bytes of shared memory that threads wrote may be touched by bulk copies and matmuls only after a fence of the
  writing thread (here: warp) between the generic and the async proxy;
- bytes that a copy or a matmul will read later are not written before, and bytes that a copy will write are not used;
- bytes that `cp.async` writes may be used only after the wait for it, and not by threads and copies before;
- the memory of a barrier is not touched.

The order in which threads see each other's plain writes is that of `races`, where it is modelled. Not modelled: caches,
banks of shared memory, and reads by threads of what a bulk copy overwrites (no fence is required there).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tests.ptx.hazards import Hazard
from tests.ptx.races import Races

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.int64]

_FIRST_ADDRESS = 1 << 32
_GUARD = 1 << 16
"""Addresses between two arrays that belong to neither."""
SHARED_BASE = 1024
"""Address of a block's shared memory: a multiple of what the widest swizzle repeats after, and not zero."""
_UNWRITTEN = 0xFF
_WIDEST_ACCESS, _BARRIER_BYTES = 16, 8


def swizzled(addresses: Addresses, width: int) -> Addresses:
    """Return the addresses of 16-byte pieces in swizzled rows of 128, 64 or 32 bytes; unchanged for any other width."""
    rows = {128: 7, 64: 3, 32: 1}.get(width, 0)
    return addresses ^ (((addresses >> 7) & rows) << 4)


def check_alignment(addresses: Addresses, size: int) -> None:
    """Raises Hazard unless all addresses are multiples of the size."""
    if (addresses % min(size, _WIDEST_ACCESS)).any():
        raise Hazard(f"an access of {size} bytes is not aligned: {addresses.tolist()}")


@dataclass
class Array:
    """An operand or a result in device memory, or one that is both and is updated in place."""

    data: Bytes
    base: int
    is_result: bool
    is_operand: bool
    is_written: npt.NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.is_written = np.zeros(len(self.data), np.bool_)

    def read(self, places: Addresses) -> Bytes:
        """Bytes at places within the array. Results may be read after they are written; what is updated in place may not."""
        if self.is_operand and self.is_written[places].any():
            raise Hazard("what is updated in place is read after it was written")
        return self.data[places]

    def write(self, places: Addresses, data: Bytes) -> None:
        """Bytes at places within the array, each of them once in its life."""
        if not self.is_result:
            raise Hazard("an operand is written")
        if self.is_written[places].any():
            raise Hazard("a result is written twice")
        self.data[places] = data
        self.is_written[places] = True


class GlobalMemory:
    """The arrays of one launch."""

    def __init__(self, operands: Sequence[Bytes], result_sizes: Sequence[int], updated: Sequence[int] = ()) -> None:
        """updated: operands that are results as well, after the other results."""
        results = [np.full(size, _UNWRITTEN, np.uint8) for size in result_sizes]
        self.arrays: list[Array] = []
        base = _FIRST_ADDRESS
        for i, data in enumerate([*operands, *results]):
            is_operand = i < len(operands)
            self.arrays.append(Array(data, base, is_result=not is_operand or i in updated, is_operand=is_operand))
            base += -(-len(data) // _GUARD) * _GUARD + _GUARD
        self.arrays += [self.arrays[i] for i in updated]

    def load(self, addresses: Addresses, size: int) -> Bytes:
        """`size` bytes at each address."""
        array, places = self._find(addresses, size)
        return array.read(places)

    def store(self, addresses: Addresses, data: Bytes) -> None:
        """A row of `data` at each address."""
        array, places = self._find(addresses, data.shape[1])
        array.write(places, data)

    def _find(self, addresses: Addresses, size: int) -> tuple[Array, Addresses]:
        check_alignment(addresses, size)
        low, high = int(addresses.min()), int(addresses.max())
        for array in self.arrays:
            if array.base <= low and high + size <= array.base + len(array.data):
                return array, (addresses - array.base)[:, None] + np.arange(size)
        raise Hazard(f"device memory is accessed out of bounds: {size} bytes at {low:#x} to {high:#x}")


class SharedMemory:
    """The shared memory of one block."""

    def __init__(self, size: int, races: Races | None = None) -> None:
        self._races = races
        self._data = np.full(size, _UNWRITTEN, np.uint8)
        self._unfenced_by = np.zeros(size, np.uint8)
        """The warp that wrote each byte since its last fence, counted from 1, or 0."""
        self._num_readers = np.zeros(size, np.uint16)
        self._is_awaited = np.zeros(size, np.bool_)
        """Copies and matmuls that are to read a byte, and whether a copy is to write it."""
        self._is_barrier = np.zeros(size, np.bool_)

    def load(self, warp: int, addresses: Addresses, size: int) -> Bytes:
        """By the threads of a warp: `size` bytes at each address."""
        check_alignment(addresses, size)
        places = self._places(addresses[:, None] + np.arange(size))
        if self._is_awaited[places].any():
            raise Hazard("threads read shared memory that a copy is to write")
        if self._races is not None:
            self._races.read(warp, places)
        return self._data[places]

    def store(self, warp: int, addresses: Addresses, data: Bytes) -> None:
        """By the threads of a warp: a row of `data` at each address."""
        size = data.shape[1]
        check_alignment(addresses, size)
        places = self._places(addresses[:, None] + np.arange(size))
        self._check_unused(places, "threads write")
        if self._races is not None:
            self._races.write(warp, places, places[self._data[places] != data])
        self._data[places] = data
        self._unfenced_by[places] = warp + 1

    def expect(self, warp: int, addresses: Addresses) -> Callable[[Bytes], None]:
        """Reserve bytes for a copy by threads (`cp.async`), which writes them when its warp waits for it."""
        places = self._places(addresses)
        self._check_unused(places, "a copy writes")
        if self._races is not None:
            self._races.begin(warp, places)
        self._is_awaited[places] = True

        def store(data: Bytes) -> None:
            self._is_awaited[places] = False
            self._data[places] = data
            self._unfenced_by[places] = warp + 1
            if self._races is not None:
                self._races.finish(warp, places)

        return store

    def order(self, warps: Iterable[int]) -> None:
        """Let warps pass a barrier together: what they did is seen by each other."""
        if self._races is not None:
            self._races.meet(warps)

    def give_to_barrier(self, address: int) -> None:
        """Reserve memory for a barrier: no other use is allowed from now on."""
        places = self._places(address + np.arange(_BARRIER_BYTES))
        self._check_unused(places, "a barrier takes")
        self._is_barrier[places] = True

    def fence(self, warp: int) -> None:
        """Make the warp's writes visible to bulk copies and matmuls."""
        self._unfenced_by[self._unfenced_by == warp + 1] = 0

    def lend(self, addresses: Addresses, who: str) -> Callable[[], Bytes]:
        """Lend bytes to a copy or a matmul, which gets them later, once: until then they must not be written."""
        places = self._fenced(addresses, who)
        if self._is_awaited[places].any():
            raise Hazard(f"{who} reads shared memory that a copy is to write")
        self._num_readers[places] += 1

        def load() -> Bytes:
            self._num_readers[places] -= 1
            return self._data[places]

        return load

    def reserve(self, addresses: Addresses, who: str) -> Callable[[Bytes], None]:
        """Reserve bytes for a copy that writes them later, once: until then they must not be used."""
        places = self._fenced(addresses, who)
        self._check_unused(places, f"{who} writes")
        self._is_awaited[places] = True

        def store(data: Bytes) -> None:
            self._is_awaited[places] = False
            self._data[places] = data

        return store

    def _check_unused(self, places: Addresses, who: str) -> None:
        if self._num_readers[places].any() or self._is_awaited[places].any():
            raise Hazard(f"{who} shared memory that a copy or a matmul still uses")

    def _fenced(self, addresses: Addresses, who: str) -> Addresses:
        places = self._places(addresses)
        if self._unfenced_by[places].any():
            raise Hazard(f"{who} uses shared memory that threads wrote and did not fence")
        return places

    def _places(self, addresses: Addresses) -> Addresses:
        places = addresses - SHARED_BASE
        if places.min() < 0 or places.max() >= len(self._data):
            raise Hazard(f"shared memory is accessed out of bounds: {places.min()} to {places.max()}")
        if self._is_barrier[places].any():
            raise Hazard("the memory of a barrier is accessed")
        return places
