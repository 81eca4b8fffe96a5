"""The tensors of a 4-bit matrix, as exporters pack them.

    w[o, i] = scale[g, o] * (number[o, i] - zero[g, o]),   numbers and zeros 0 to 15, i in group g

Eight numbers are packed into an int32, the first into its lowest bits:

| `quant_method` | numbers | along | zeros | along |
|---|---|---|---|---|
| `compressed-tensors` | `weight_packed` [O, I / 8] | inputs | `weight_zero_point` [O / 8, G]; without: 8 | outputs |
| `gptq` | `qweight` [I / 8, O] | inputs | `qzeros` [G, O / 8], less 1 but for `gptq_v2` | outputs |
| `awq` | `qweight` [I, O / 8] | outputs, even ones first | `qzeros` [G, O / 8] | as its numbers |

Scales are `weight_scale` [O, G], or `scales` [G, O]. The tensors decide which matrices are quantised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from jaxserve.errors import CheckpointError, shown
from jaxserve.quant.checkpoint import COMPRESSED_TENSORS, Read, misshapen
from jaxserve.quant.formats._int4_config import Int4Layout
from jaxserve.quant.tensor import TensorInfo

_PER_WORD: Final = 8
_MIDDLE: Final = 8
_IN_ORDER: Final = tuple(range(_PER_WORD))
_EVEN_FIRST: Final = (0, 2, 4, 6, 1, 3, 5, 7)
_EVERYTHING: Final = (slice(None), slice(None))


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """The stored tensors of one matrix, and its shape."""

    layout: Int4Layout
    numbers: TensorInfo
    scales: TensorInfo
    zeros: TensorInfo | None
    groups_of_inputs: TensorInfo | None
    shape: tuple[int, int]
    num_groups: int

    @property
    def num_stored_bytes(self) -> int:
        """Bytes in the files."""
        parts = (self.numbers, self.scales, self.zeros)
        return sum(part.num_stored_bytes for part in parts if part is not None)

    def read_numbers(self, read: Read, outputs: range | None = None, inputs: range | None = None) -> np.ndarray:
        """Return int8 [O, I] from -8 to 7: of some outputs and inputs, None being all. Only the words that hold them are read."""
        packed = read(self.numbers.name)
        own = range(self.shape[0]) if outputs is None else outputs, range(self.shape[1]) if inputs is None else inputs
        match self.layout.method:
            case "compressed-tensors":
                numbers = _part(packed, own, 1)
            case "gptq":
                numbers = _part(packed, own[::-1], 0).T
            case "awq":
                numbers = _part(packed, own[::-1], 1, _EVEN_FIRST).T
        return numbers - np.int8(_MIDDLE)

    def read_scales(self, read: Read, part: tuple[slice, slice] = _EVERYTHING) -> np.ndarray:
        """Return float32 [O, G]; check what config.json says of the matrix's other tensors. part: outputs and groups."""
        zeros, groups = self.zeros, self.groups_of_inputs
        if zeros is not None and not self.layout.has_zeros and (self._read_zeros(read) != _MIDDLE).any():
            raise CheckpointError(
                f"{zeros.file}: tensor {shown(zeros.name)}: expected {_MIDDLE}, as for `sym`, found others"
            )
        if groups is not None and not self.layout.is_ordered:
            neighbours = np.arange(self.shape[1]) // (self.shape[1] // self.num_groups)
            if (read(groups.name) != neighbours).any():
                raise CheckpointError(
                    f"{groups.file}: tensor {shown(groups.name)}: expected groups of neighbours, found others"
                )
        scales = read(self.scales.name)
        return (scales if self.layout.method == COMPRESSED_TENSORS else scales.T)[part].astype(np.float32)

    def read_offsets(self, read: Read, part: tuple[slice, slice] = _EVERYTHING) -> np.ndarray | None:
        """Return scale * (8 - zero), float32 [O, G]; None if every zero is 8. part: outputs and groups."""
        if not self.layout.has_zeros or self.zeros is None:
            return None
        return self.read_scales(read, part) * (_MIDDLE - self._read_zeros(read)[part].astype(np.float32))

    def dequantize(self, read: Read) -> np.ndarray:
        """Return float32 [O, I] of a matrix whose groups are not of neighbours."""
        assert self.groups_of_inputs is not None, "checked as the file was opened"
        groups = read(self.groups_of_inputs.name)
        if groups.min() < 0 or groups.max() >= self.num_groups:
            name = shown(self.groups_of_inputs.name)
            raise CheckpointError(f"{self.numbers.file}: tensor {name}: expected groups 0 to {self.num_groups - 1}")
        wide = self.read_numbers(read).astype(np.float32)
        wide *= self.read_scales(read)[:, groups]
        offsets = self.read_offsets(read)
        if offsets is not None:
            wide += offsets[:, groups]
        return wide

    def _read_zeros(self, read: Read) -> np.ndarray:
        """Return [O, G], 0 to 15."""
        assert self.zeros is not None, "only called for a matrix that has them"
        packed = read(self.zeros.name)
        if self.layout.method == COMPRESSED_TENSORS:
            return _unpacked(packed, 0)
        zeros = _unpacked(packed, 1, _EVEN_FIRST if self.layout.method == "awq" else _IN_ORDER)
        return ((zeros + np.int8(self.layout.zero_shift)) & np.int8(15)).T


def _part(packed: np.ndarray, part: tuple[range, range], axis: int, order: tuple[int, ...] = _IN_ORDER) -> np.ndarray:
    """Return the numbers of a part of a matrix. axis: along which eight numbers are packed into a word."""
    own = part[axis]
    words = slice(own.start // _PER_WORD, -(-own.stop // _PER_WORD))
    numbers, skipped = slice(own.start % _PER_WORD, own.start % _PER_WORD + len(own)), part[1 - axis]
    other = slice(skipped.start, skipped.stop)
    if axis == 0:
        return _unpacked(packed[words, other], 0, order)[numbers]
    return _unpacked(packed[other, words], 1, order)[:, numbers]


def _unpacked(packed: np.ndarray, axis: int, order: tuple[int, ...] = _IN_ORDER) -> np.ndarray:
    """Return int8, 0 to 15, eight times as many along the axis. order: places of the numbers of a word."""
    words = np.ascontiguousarray(packed).view(np.uint32)
    shape = [size * (_PER_WORD if index == axis else 1) for index, size in enumerate(words.shape)]
    numbers = np.empty(shape, np.int8)
    for index, place in enumerate(order):
        to = numbers[place::_PER_WORD] if axis == 0 else numbers[:, place::_PER_WORD]
        to[...] = (words >> np.uint32(4 * index)) & np.uint32(15)
    return numbers


def take_matrix(tensors: dict[str, TensorInfo], module: str, layout: Int4Layout) -> PackedMatrix:
    """Take the tensors of a module out of `tensors`. Raises CheckpointError if one is missing or misshapen."""

    def taken(name: str, *, is_needed: bool) -> TensorInfo | None:
        info = tensors.pop(f"{module}.{name}", None)
        if info is None and is_needed:
            raise CheckpointError(f"{numbers.file}: tensor {shown(numbers.name)}: expected its {name}, found none")
        return info

    numbers = tensors.pop(module + layout.suffix)
    if len(numbers.shape) != 2 or numbers.stored_dtype != "I32":
        raise misshapen(numbers, "two dimensions of I32")
    height, width = numbers.shape
    if layout.method == COMPRESSED_TENSORS:
        scales = taken("weight_scale", is_needed=True)
        zeros = taken("weight_zero_point", is_needed=layout.has_zeros)
        taken("weight_shape", is_needed=False)
        groups_of_inputs = taken("weight_g_idx", is_needed=layout.is_ordered)
        shape = height, width * _PER_WORD
    else:
        scales, zeros = taken("scales", is_needed=True), taken("qzeros", is_needed=True)
        groups_of_inputs = taken("g_idx", is_needed=layout.is_ordered)
        shape = (width, height * _PER_WORD) if layout.method == "gptq" else (width * _PER_WORD, height)
    assert scales is not None, "needed"
    num_groups = shape[1] // (layout.group_size or shape[1])
    matrix = PackedMatrix(layout, numbers, scales, zeros, groups_of_inputs, shape, num_groups)
    _check_shapes(matrix)
    return matrix


def _check_shapes(matrix: PackedMatrix) -> None:
    layout, scales, zeros, groups = matrix.layout, matrix.scales, matrix.zeros, matrix.groups_of_inputs
    num_outputs, num_inputs = matrix.shape
    size = layout.group_size or num_inputs
    across, words = (matrix.num_groups, num_outputs), (matrix.num_groups, -(-num_outputs // _PER_WORD))
    if layout.method == COMPRESSED_TENSORS:
        across, words = across[::-1], words[::-1]
    if num_inputs % size or scales.shape != across:
        raise misshapen(
            scales, f"{across}, a scale for each of {num_outputs} outputs and {size} of {num_inputs} inputs"
        )
    if zeros is not None and (zeros.shape != words or zeros.stored_dtype != "I32" or num_outputs % _PER_WORD):
        raise misshapen(zeros, f"{words} of I32")
    if groups is not None and groups.shape != (num_inputs,):
        raise misshapen(groups, f"the group of each of {num_inputs} inputs")
