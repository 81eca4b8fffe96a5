"""A quantised weight as one value: numbers, scales and offsets. Imports no jax; `quant.pytree` registers it there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import ml_dtypes
import numpy as np
from jaxserve_kernels.tpu_words import LANES, UNIT

from jaxserve.quant.tensor import scaled

if TYPE_CHECKING:
    from jaxserve.quant.format import Format

T = TypeVar("T")
R = TypeVar("R")
Axes = tuple[str | None, ...]
"""The logical axis of each dimension."""

Ranges = tuple[range, ...]
"""A part of an array: a range of each dimension."""


@dataclass(frozen=True, slots=True)
class QuantArray(Generic[T]):
    """A weight matrix as its format stores it. T is a numpy or jax array, or what describes one.

    On the host (a checkpoint's tensor) outputs are the first dimension of every array. On a device the arrays lie as
    `Format.to_device` leaves them.
    """

    format: Format
    values: T
    """`[out, in]`, or as the format packs them."""
    scales: T | None = None
    offsets: T | None = None
    matrix_scales: T | None = None
    """Scales of the whole matrix, in formats that have them beside those of blocks."""

    @property
    def arrays(self) -> tuple[T, ...]:
        """The arrays that there are: values, scales, offsets, scales of the matrix."""
        own = (self.values, self.scales, self.offsets, self.matrix_scales)
        return tuple(each for each in own if each is not None)

    def with_arrays(self, arrays: Iterable[R]) -> QuantArray[R]:
        """Return the same structure over other arrays, given in the order of `arrays`."""
        remaining: Iterator[Any] = iter(arrays)
        own = (self.values, self.scales, self.offsets, self.matrix_scales)
        return QuantArray(self.format, *(None if each is None else next(remaining) for each in own))

    def map(self, compute: Callable[[T], R]) -> QuantArray[R]:
        """Return compute(array) for each array."""
        return self.with_arrays(map(compute, self.arrays))

    def dequantize(self) -> np.ndarray:
        """Return `[out, in]` weights in a float dtype. Only for arrays on the host."""
        host: QuantArray[Any] = self
        return self.format.dequantize(host)

    def columns(self, inputs: range, num_inputs: int) -> QuantArray[Any] | None:
        """See `QuantizedTensor.columns`. Only for one matrix on the host."""
        host: QuantArray[Any] = self
        parts = [
            range(array.shape[-1])
            if array.ndim == 1 or array is host.matrix_scales
            else scaled(inputs, num_inputs, array.shape[1])
            for array in host.arrays
        ]
        if any(part is None for part in parts):
            return None
        cut = [
            array[..., part.start : part.stop]
            for array, part in zip(host.arrays, parts, strict=True)
            if part is not None
        ]
        return host.with_arrays(cut)

    def __getitem__(self, index: Any) -> QuantArray[Any]:
        arrays: tuple[Any, ...] = self.arrays
        return self.with_arrays(array[index] for array in arrays)


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array that is declared, not allocated."""

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: Axes

    @property
    def num_bytes(self) -> int:
        """Bytes over all devices, each part counted once."""
        return array_bytes(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """A weight matrix as a layer declares it, before a format decides how to store it."""

    out_dim: int
    in_dim: int
    axes: Axes
    """Logical axes of outputs and inputs."""
    weights: np.dtype
    """Dtype of weights that are not quantised."""
    activations: np.dtype
    num_experts: int | None = None
    """Experts that each have such a matrix: the first dimension of every array. None: one matrix."""
    num_input_shards: int = 1
    """Devices that split the inputs."""
    num_output_shards: int = 1
    """Devices that split the outputs."""
    stored_kind: str | None = None
    """Block type of the matrix in a GGUF file, by ggml's name, for formats that keep blocks; None: it has none."""
    group_size: int | None = None
    """Inputs that share a scale in the checkpoint; a format may cut groups into smaller ones. None: the format's own."""
    has_offsets: bool = False
    platform: str = "gpu"

    @property
    def shape(self) -> tuple[int, ...]:
        """`[out, in]`, or `[experts, out, in]`."""
        return (*self._experts, self.out_dim, self.in_dim)

    @property
    def has_words(self) -> bool:
        """True for a TPU if each device has whole words and lanes of the matrix: see `jaxserve_kernels.tpu_words`."""
        is_whole = self.in_dim % (UNIT * self.num_input_shards) == self.out_dim % (LANES * self.num_output_shards) == 0
        return self.platform == "tpu" and is_whole

    def array(self, shape: tuple[int, ...], axes: Axes, dtype: Any) -> ArraySpec:
        """Declare an array of one matrix; those of all experts come first."""
        experts = self._experts
        return ArraySpec((*experts, *shape), np.dtype(dtype), (*("experts" for _ in experts), *axes))

    @property
    def _experts(self) -> tuple[int, ...]:
        return () if self.num_experts is None else (self.num_experts,)


def array_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Return the bytes of an array on a device, where two 4-bit values share a byte."""
    return math.prod(shape) * _bits(dtype) // 8


def _bits(dtype: np.dtype) -> int:
    for info in (ml_dtypes.iinfo, ml_dtypes.finfo):
        try:
            return int(info(dtype).bits)
        except ValueError:
            continue
    return 8 * dtype.itemsize
