"""Symmetric 8-bit weights: one scale per output, whose largest weight becomes the dtype's largest value."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from jaxserve.errors import CheckpointError, shown
from jaxserve.quant.array import ArraySpec, MatrixSpec, QuantArray
from jaxserve.quant.checkpoint import Read
from jaxserve.quant.format import Format, Host
from jaxserve.quant.tensor import TensorInfo


class RowFormat(Format):
    """Values `[out, in]` in 8 bits and float32 scales `[out]`."""

    bits: ClassVar[int] = 8
    is_by_row: ClassVar[bool] = True
    dtype: ClassVar[np.dtype]

    def values_dtype(self, weights: np.dtype, platform: str) -> np.dtype:
        return self.dtype

    def declare(self, spec: MatrixSpec) -> QuantArray[ArraySpec]:
        values = spec.array((spec.out_dim, spec.in_dim), spec.axes, self.dtype)
        return QuantArray(self, values, spec.array((spec.out_dim,), spec.axes[:1], np.float32))

    def quantize(self, weights: np.ndarray, declared: QuantArray[ArraySpec]) -> Host:
        """Round to nearest. Rows of zeros get the scale 1."""
        wide = weights.astype(np.float32, copy=False)
        largest = np.abs(wide).max(axis=1)
        scales = np.where(largest == 0, np.float32(1), largest / np.float32(self.largest))
        return QuantArray(self, self.rounded(wide / scales[:, None]).astype(self.dtype), scales)

    def rounded(self, scaled: np.ndarray) -> np.ndarray:
        """Return what a cast to `dtype` rounds to the nearest: floats themselves."""
        return scaled

    def keep(self, stored: Host, declared: QuantArray[ArraySpec]) -> Host | None:
        scales = stored.scales
        if stored.values.dtype != self.dtype or scales is None or scales.ndim != 1:
            return None
        return QuantArray(self, stored.values, scales)

    def dequantize(self, stored: Host) -> np.ndarray:
        assert stored.scales is not None, "every row has a scale"
        wide: np.ndarray = stored.values.astype(np.float32, order="C")
        wide *= stored.scales[..., None]
        return wide


def pop_scale(tensors: dict[str, TensorInfo], matrix: TensorInfo, *suffixes: str) -> TensorInfo:
    """Remove the scales of a stored matrix, and return them. Raises CheckpointError if there are none."""
    for name in (matrix.name + suffix for suffix in suffixes):
        if name in tensors:
            return tensors.pop(name)
    raise CheckpointError(f"{matrix.file}: tensor {shown(matrix.name)}: expected its weight_scale, found none")


def has_rows(matrix: TensorInfo, scale: TensorInfo) -> bool:
    """Return True if there is one scale, or one for each output; also one for each expert, or for each half of its outputs, of matrices
    `[experts, out, in]`."""
    return _scales_shape(matrix, scale) is not None


def _scales_shape(matrix: TensorInfo, scale: TensorInfo) -> tuple[int, ...] | None:
    """Return the shape of scales with an axis for each of the matrix but its inputs; None if others share a scale."""
    if len(matrix.shape) < 2:
        return None
    *experts, num_outputs, _ = matrix.shape
    own = scale.shape
    while own[-1:] == (1,):
        own = own[:-1]
    own += (1,) * (1 + len(experts) - len(own))
    counts = {1, num_outputs} | ({2} if experts and num_outputs % 2 == 0 else set())
    is_known = own[-1] in counts and (own[:-1] == (*experts,) or set(own) == {1})
    return own if is_known else None


def read_rows(form: RowFormat, matrix: TensorInfo, scale: TensorInfo, read: Read) -> Host:
    """Return a stored matrix, or those of all experts, with a scale for each output."""
    shape = _scales_shape(matrix, scale)
    assert shape is not None, "see `has_rows`"
    scales = read(scale.name).astype(np.float32).reshape(shape)
    if 1 < shape[-1] < matrix.shape[-2]:
        scales = scales.repeat(matrix.shape[-2] // shape[-1], axis=-1)
    return QuantArray(form, read(matrix.name), np.broadcast_to(scales, matrix.shape[:-1]))
