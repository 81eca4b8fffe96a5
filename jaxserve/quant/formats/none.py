"""Weights in one float dtype, not quantised."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from jaxserve.quant.array import ArraySpec, MatrixSpec, QuantArray
from jaxserve.quant.format import Format, Host


class NoQuantization(Format):
    """`[out, in]` in the dtype of the model's weights."""

    name = "none"
    bits: ClassVar[int] = 16
    is_by_row: ClassVar[bool] = True

    def values_dtype(self, weights: np.dtype, platform: str) -> np.dtype:
        return weights

    def declare(self, spec: MatrixSpec) -> QuantArray[ArraySpec]:
        return QuantArray(self, spec.array((spec.out_dim, spec.in_dim), spec.axes, spec.weights))

    def quantize(self, weights: np.ndarray, declared: QuantArray[ArraySpec]) -> Host:
        return QuantArray(self, weights.astype(declared.values.dtype, copy=False))

    def dequantize(self, stored: Host) -> np.ndarray:
        return stored.values

    def random(self, noise: np.ndarray, declared: QuantArray[ArraySpec], deviation: float) -> Host:
        values = declared.values
        return QuantArray(self, (deviation * np.resize(noise, values.shape)).astype(values.dtype))


FORMAT = NoQuantization()
