"""int8 weights, and activations quantised to int8 token by token: the matmul is exact in int32."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from jaxserve.quant.formats._rows import RowFormat


class Int8(RowFormat):
    """int8 weights and activations."""

    name = "int8"
    dtype = np.dtype(np.int8)
    largest = 127
    quantizes_activations = True
    arithmetic: ClassVar[str | None] = "int8"

    def rounded(self, scaled: np.ndarray) -> np.ndarray:
        nearest: np.ndarray = np.rint(scaled)
        return nearest


FORMAT = Int8()
