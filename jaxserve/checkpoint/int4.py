"""Checkpoints whose matrices are stored in 4 bits: what config.json says of them, and how their numbers lie.

    w[o, i] = scale[g, o] * (number[o, i] - zero[g, o]),   numbers and zeros 0 to 15, i in group g

Eight numbers are packed into an int32, the first into its lowest bits:

| `quant_method` | numbers | along | zeros | along |
|---|---|---|---|---|
| `compressed-tensors` | `weight_packed` [O, I / 8] | inputs | `weight_zero_point` [O / 8, G]; without: 8 | outputs |
| `gptq` | `qweight` [I / 8, O] | inputs | `qzeros` [G, O / 8], less 1 but for `gptq_v2` | outputs |
| `awq` | `qweight` [I, O / 8] | outputs, even ones first | `qzeros` [G, O / 8] | as its numbers |

Scales are `weight_scale` [O, G], or `scales` [G, O]. Which matrices are stored like that is told by the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

import msgspec
import numpy as np

from jaxserve.checkpoint.fp8 import ROW_SCALES
from jaxserve.checkpoint.mapped_file import shown
from jaxserve.checkpoint.protocol import Checkpoint, TensorInfo
from jaxserve.checkpoint.view import CheckpointView
from jaxserve.config import WeightFormat
from jaxserve.errors import CheckpointError

INT4: Final = "I4"
OFFSETS: Final = "_offset"
"""Behind the name of a matrix: the name of what is added to each output of a group, `scale * (8 - zero)`."""
_PER_WORD: Final = 8
_MIDDLE: Final = 8
_IN_ORDER: Final = tuple(range(_PER_WORD))
_EVEN_FIRST: Final = (0, 2, 4, 6, 1, 3, 5, 7)

Layout = Literal["compressed-tensors", "gptq", "awq"]


class StoredInt4(msgspec.Struct, frozen=True, tag=True):
    """How a checkpoint in 4 bits is laid out."""

    layout: Layout
    group_size: int | None
    """Inputs of a group; None: all."""
    has_zeros: bool
    """Whether zeros are others than 8."""
    is_ordered: bool = False
    """Whether a group is not of neighbours, but of inputs that count alike: `desc_act`."""
    zero_shift: int = 0
    """What zeros are stored less than they are."""
    plain_matrices: tuple[str, ...] = ("lm_head", "model.embed_tokens")
    """Modules that are stored whole."""

    @property
    def format(self) -> WeightFormat:
        """That keeps what is stored; none where it is widened as it is loaded."""
        return "none" if self.is_ordered else "int4-weight-only"

    @property
    def note(self) -> str | None:
        """What a user should know of serving it as it is."""
        if not self.is_ordered:
            return None
        return (
            "4-bit weights whose groups are no neighbours (act-order) are widened as they are loaded; --quantization "
            "int4-weight-only keeps 4 bits, rounded again in groups of neighbours"
        )

    @property
    def suffix(self) -> str:
        """Of a module's numbers."""
        return ".weight_packed" if self.layout == "compressed-tensors" else ".qweight"


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The tensors of one module, and its weights' shape."""

    numbers: TensorInfo
    scales: TensorInfo
    zeros: TensorInfo | None
    groups_of_inputs: TensorInfo | None
    shape: tuple[int, int]
    num_groups: int


@dataclass(frozen=True, slots=True)
class Int4Checkpoint(CheckpointView):
    """A checkpoint with matrices in 4 bits.

    Of each it has, under the matrix's own name, int8 numbers from -8 to 7, as `NAME_scale` float32 scales [O, G], and
    with zeros as `NAME_offset` the same of `OFFSETS`. Where groups are not of neighbours it has float32 weights alone.
    """

    matrices: Mapping[str, _Matrix]
    """By the name of the weights."""
    stored: StoredInt4

    def read(self, name: str) -> np.ndarray:
        if name in self.matrices:
            matrix = self.matrices[name]
            return self._widened(matrix) if self.stored.is_ordered else self._numbers(matrix)
        for suffix, read in ((ROW_SCALES, self._scales), (OFFSETS, self._offsets)):
            if name.removesuffix(suffix) in self.matrices:
                return read(self.matrices[name.removesuffix(suffix)])
        return self.inner.read(name)

    def _numbers(self, matrix: _Matrix) -> np.ndarray:
        """[O, I]"""
        packed = self.inner.read(matrix.numbers.name)
        match self.stored.layout:
            case "compressed-tensors":
                numbers = _unpacked(packed, 1)
            case "gptq":
                numbers = _unpacked(packed, 0).T
            case "awq":
                numbers = _unpacked(packed, 1, _EVEN_FIRST).T
        return numbers - np.int8(_MIDDLE)

    def _scales(self, matrix: _Matrix) -> np.ndarray:
        """[O, G]; checks what config.json says of the module's other tensors."""
        scales, zeros, groups = (
            self.inner.read(matrix.scales.name).astype(np.float32),
            matrix.zeros,
            matrix.groups_of_inputs,
        )
        if zeros is not None and not self.stored.has_zeros and (self._zeros(matrix) != _MIDDLE).any():
            raise CheckpointError(
                f"{zeros.file}: tensor {shown(zeros.name)}: expected {_MIDDLE}, as for `sym`, found others"
            )
        if groups is not None and not self.stored.is_ordered:
            neighbours = np.arange(matrix.shape[1]) // (matrix.shape[1] // matrix.num_groups)
            if (self.inner.read(groups.name) != neighbours).any():
                raise CheckpointError(
                    f"{groups.file}: tensor {shown(groups.name)}: expected groups of neighbours, found others"
                )
        return scales if self.stored.layout == "compressed-tensors" else scales.T

    def _zeros(self, matrix: _Matrix) -> np.ndarray:
        """[O, G]"""
        assert matrix.zeros is not None, "asked for where there are some"
        packed = self.inner.read(matrix.zeros.name)
        if self.stored.layout == "compressed-tensors":
            return _unpacked(packed, 0)
        zeros = _unpacked(packed, 1, _EVEN_FIRST if self.stored.layout == "awq" else _IN_ORDER)
        return ((zeros + np.int8(self.stored.zero_shift)) & np.int8(15)).T

    def _offsets(self, matrix: _Matrix) -> np.ndarray:
        """[O, G]"""
        return self._scales(matrix) * (_MIDDLE - self._zeros(matrix).astype(np.float32))

    def _widened(self, matrix: _Matrix) -> np.ndarray:
        """[O, I]"""
        assert matrix.groups_of_inputs is not None, "checked as the file was opened"
        groups = self.inner.read(matrix.groups_of_inputs.name)
        if groups.min() < 0 or groups.max() >= matrix.num_groups:
            name = shown(matrix.groups_of_inputs.name)
            raise CheckpointError(f"{matrix.numbers.file}: tensor {name}: expected groups 0 to {matrix.num_groups - 1}")
        wide = self._numbers(matrix).astype(np.float32)
        wide *= self._scales(matrix)[:, groups]
        if self.stored.has_zeros:
            wide += self._offsets(matrix)[:, groups]
        return wide


def _unpacked(packed: np.ndarray, axis: int, order: tuple[int, ...] = _IN_ORDER) -> np.ndarray:
    """int8, 0 to 15, eight times as many along the axis. order: where the numbers of a word belong."""
    words = packed.view(np.uint32)
    shape = [size * (_PER_WORD if index == axis else 1) for index, size in enumerate(words.shape)]
    numbers = np.empty(shape, np.int8)
    for index, place in enumerate(order):
        to = numbers[place::_PER_WORD] if axis == 0 else numbers[:, place::_PER_WORD]
        to[...] = (words >> np.uint32(4 * index)) & np.uint32(15)
    return numbers


def with_groups(checkpoint: Checkpoint, stored: StoredInt4) -> Checkpoint:
    """The same, with what is stored in 4 bits, its scales and its offsets under names of their own.

    Raises CheckpointError in one line where a tensor is missing or has another shape.
    """
    tensors, matrices = dict(checkpoint.tensors), {}
    for name in checkpoint.tensors:
        if not name.endswith(stored.suffix):
            continue
        module = name.removesuffix(stored.suffix)
        matrix = _matrix(tensors, module, stored)
        weight = f"{module}.weight"
        matrices[weight] = matrix
        tensors[weight] = replace(matrix.numbers, name=weight, shape=matrix.shape, stored_dtype=INT4)
        across = (matrix.shape[0], matrix.num_groups)
        if not stored.is_ordered:
            tensors[weight + ROW_SCALES] = replace(matrix.scales, name=weight + ROW_SCALES, shape=across)
            if stored.has_zeros and matrix.zeros is not None:
                tensors[weight + OFFSETS] = replace(matrix.zeros, name=weight + OFFSETS, shape=across)
    return Int4Checkpoint(checkpoint, tensors, matrices, stored)


def _matrix(tensors: dict[str, TensorInfo], module: str, stored: StoredInt4) -> _Matrix:
    """Takes the module's tensors out of `tensors`."""

    def taken(name: str, *, is_needed: bool) -> TensorInfo | None:
        info = tensors.pop(f"{module}.{name}", None)
        if info is None and is_needed:
            raise CheckpointError(f"{numbers.file}: tensor {shown(numbers.name)}: expected its {name}, found none")
        return info

    numbers = tensors.pop(module + stored.suffix)
    if len(numbers.shape) != 2 or numbers.stored_dtype != "I32":
        raise _misshapen(numbers, "two dimensions of I32")
    height, width = numbers.shape
    if stored.layout == "compressed-tensors":
        scales = taken("weight_scale", is_needed=True)
        zeros = taken("weight_zero_point", is_needed=stored.has_zeros)
        taken("weight_shape", is_needed=False)
        groups_of_inputs = taken("weight_g_idx", is_needed=False)
        shape = height, width * _PER_WORD
    else:
        scales, zeros = taken("scales", is_needed=True), taken("qzeros", is_needed=True)
        groups_of_inputs = taken("g_idx", is_needed=stored.is_ordered)
        is_gptq = stored.layout == "gptq"
        shape = (width, height * _PER_WORD) if is_gptq else (width * _PER_WORD, height)
    assert scales is not None, "needed"
    num_outputs, num_inputs = shape
    size = stored.group_size or num_inputs
    num_groups, rest = divmod(num_inputs, size)
    across, words = (num_groups, num_outputs), (num_groups, -(-num_outputs // _PER_WORD))
    if stored.layout == "compressed-tensors":
        across, words = across[::-1], words[::-1]
    if rest or scales.shape != across:
        raise _misshapen(
            scales, f"{across}, a scale for each of {num_outputs} outputs and {size} of {num_inputs} inputs"
        )
    if zeros is not None and (zeros.shape != words or zeros.stored_dtype != "I32" or num_outputs % _PER_WORD):
        raise _misshapen(zeros, f"{words} of I32")
    if groups_of_inputs is not None and groups_of_inputs.shape != (num_inputs,):
        raise _misshapen(groups_of_inputs, f"the group of each of {num_inputs} inputs")
    return _Matrix(numbers, scales, zeros, groups_of_inputs, shape, num_groups)


def _misshapen(info: TensorInfo, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: tensor {shown(info.name)}: expected {expected}, found shape {info.shape} of {info.stored_dtype}"
    )
