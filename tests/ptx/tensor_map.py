"""Boxes of an array, as bulk copies take them between device memory and shared memory.

Modelled, from the PTX ISA ("Tensors", "Tiled mode", "Swizzling Modes") and the requirements of the driver's
`cuTensorMapEncodeTiled`: strides, boxes that reach over the border (zeros are read there), swizzles, alignment; 4-bit
numbers two in a byte. Not modelled: im2col, interleaving, other fillings, writing of boxes that reach over the border:
a kernel that did would be refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.ptx.hazards import Hazard, NotModelled
from tests.ptx.memory import Addresses, Array, Bytes, swizzled

_MOST_DIMENSIONS, _LARGEST_BOX, _ALIGNMENT, _SHARED_ALIGNMENT, _LARGEST_STRIDE = 5, 256, 16, 128, 1 << 40
_SWIZZLES = (32, 64, 128)


@dataclass(frozen=True)
class TensorMap:
    """Sizes count from the outermost dimension; those of numbers below a byte count bytes in the last one."""

    array: Array
    start: int
    """First byte of the first number in the array."""
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In numbers; the last one is 1."""
    box: tuple[int, ...]
    swizzle: int
    """Width in bytes; others than 32, 64 and 128 are none."""
    is_packed: bool = False
    """True if a byte holds two numbers."""

    def __post_init__(self) -> None:
        row = self.box[-1] * self.itemsize
        is_fine = (
            len(self.shape) <= _MOST_DIMENSIONS
            and all(0 < size <= 1 << 32 for size in self.shape)
            and all(0 < size <= _LARGEST_BOX for size in self.box)
            and (self.array.base + self.start) % _ALIGNMENT == row % _ALIGNMENT == 0
            and self.strides[-1] == 1
            and all(stride * self.itemsize % _ALIGNMENT == 0 for stride in self.strides[:-1])
            and all(stride * self.itemsize < _LARGEST_STRIDE for stride in self.strides[:-1])
            and (self.swizzle not in _SWIZZLES or row <= self.swizzle)
        )
        if not is_fine:
            raise Hazard(f"a tensor map that the driver would refuse: {self}")

    def __str__(self) -> str:
        return f"{self.itemsize}-byte numbers {self.shape} by {self.strides}, box {self.box}, swizzle {self.swizzle}"

    @property
    def num_bytes(self) -> int:
        """Bytes of a box."""
        return int(np.prod(self.box)) * self.itemsize

    def read(self, place: Sequence[int]) -> Bytes:
        """The box that begins at `place`."""
        bytes_of, is_inside = self._bytes_of_box(place)
        data: Bytes = np.zeros(bytes_of.shape, np.uint8)
        data[is_inside] = self.array.data[bytes_of[is_inside]]
        return data.reshape(-1)

    def write(self, place: Sequence[int], data: Bytes) -> None:
        """The whole box."""
        bytes_of, is_inside = self._bytes_of_box(place)
        if not is_inside.all():
            raise Hazard(f"a bulk copy writes over the border: {list(place)} of {self}")
        self.array.write(bytes_of.reshape(-1), data)

    def shared_addresses(self, address: int) -> Addresses:
        """Return the addresses of a box's bytes in shared memory."""
        if address % _SHARED_ALIGNMENT:
            raise Hazard(f"a bulk copy's shared memory is not aligned to {_SHARED_ALIGNMENT} bytes: {address}")
        return swizzled(address + np.arange(self.num_bytes), self.swizzle)

    def _bytes_of_box(self, place: Sequence[int]) -> tuple[Addresses, npt.NDArray[np.bool_]]:
        """Return for each number of the box its bytes in the array, and True if it lies in the tensor."""
        if len(place) != len(self.shape):
            raise NotModelled(f"{len(place)} coordinates of {self}")
        first = packed(place) if self.is_packed else tuple(place)
        numbers = np.zeros(self.box, np.int64)
        is_inside = np.ones(self.box, np.bool_)
        sizes = zip(first, self.shape, self.strides, self.box, strict=True)
        for dimension, (begin, size, stride, count) in enumerate(sizes):
            along = (begin + np.arange(count)).reshape([-1] + [1] * (len(self.box) - 1 - dimension))
            numbers += along * stride
            is_inside &= (along >= 0) & (along < size)
        first_bytes = self.start + numbers.reshape(-1, 1) * self.itemsize
        return first_bytes + np.arange(self.itemsize), is_inside.reshape(-1)


def packed(sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes or coordinates of 4-bit numbers, counted in bytes along the last dimension."""
    if sizes[-1] % 2:
        raise NotModelled(f"4-bit numbers that end within a byte: {sizes}")
    return (*sizes[:-1], sizes[-1] // 2)


def in_bytes(strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of 4-bit numbers that lie side by side, in bytes; the last one counts bytes that lie side by side."""
    if strides[-1] != 1 or any(stride % 2 for stride in strides[:-1]):
        raise NotModelled(f"4-bit numbers that begin within a byte: strides {strides}")
    return (*(stride // 2 for stride in strides[:-1]), 1)
