"""Weights that are not quantised, stored with the inputs first: for matmuls of few inputs, and kernels that add their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from jaxserve_kernels.backend import Backend

from jaxserve.quant.array import ArraySpec, MatrixSpec, QuantArray
from jaxserve.quant.format import Host
from jaxserve.quant.formats.none import NoQuantization


class Transposed(NoQuantization):
    """`[in, out]` in the dtype of the model's weights."""

    is_by_row: ClassVar[bool] = False

    def declare(self, spec: MatrixSpec) -> QuantArray[ArraySpec]:
        return QuantArray(self, spec.array((spec.in_dim, spec.out_dim), spec.axes[::-1], spec.weights))

    def to_device(self, host: Host) -> Host:
        return QuantArray(self, np.ascontiguousarray(host.values.T))

    def matmuls(
        self, x: Any, weights: Sequence[QuantArray[Any]], num_rows: Any, backend: Backend, dtype: Any = "float32"
    ) -> list[Any]:
        from jaxserve_kernels.matmul import matmul

        return [matmul(x, weight.values.T, num_rows=num_rows, dtype=dtype) for weight in weights]


TRANSPOSED = Transposed()
