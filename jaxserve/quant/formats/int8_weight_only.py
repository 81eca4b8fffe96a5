"""int8 weights, upcast to the activations' dtype in the matmul."""

from __future__ import annotations

from jaxserve.quant.formats.int8 import Int8


class Int8WeightOnly(Int8):
    """int8 weights, activations as they are."""

    name = "int8-weight-only"
    quantizes_activations = False
    arithmetic = None


FORMAT = Int8WeightOnly()
