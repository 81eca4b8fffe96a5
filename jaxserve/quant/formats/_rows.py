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
        wide *= stored.scales[:, None]
        return wide


def pop_scale(tensors: dict[str, TensorInfo], matrix: TensorInfo, *suffixes: str) -> TensorInfo:
    """Remove the scales of a stored matrix, and return them. Raises CheckpointError if there are none."""
    for name in (matrix.name + suffix for suffix in suffixes):
        if name in tensors:
            return tensors.pop(name)
    raise CheckpointError(f"{matrix.file}: tensor {shown(matrix.name)}: expected its weight_scale, found none")


def has_rows(matrix: TensorInfo, scale: TensorInfo) -> bool:
    """Return True if there is one scale, or one for each output."""
    rows = matrix.shape[:1]
    return scale.shape in ((), (1,), rows, (*rows, 1))


def read_rows(form: RowFormat, matrix: TensorInfo, scale: TensorInfo, read: Read) -> Host:
    """Return a stored matrix with a scale for each output."""
    scales = read(scale.name).astype(np.float32).reshape(-1)
    return QuantArray(form, read(matrix.name), np.broadcast_to(scales, matrix.shape[:1]))
