"""e4m3 weights, upcast to the activations' dtype in the matmul."""

from __future__ import annotations

from jaxserve.quant.formats.fp8 import Fp8


class Fp8WeightOnly(Fp8):
    """e4m3 weights, activations as they are."""

    name = "fp8-weight-only"
    quantizes_activations = False
    arithmetic = None


FORMAT = Fp8WeightOnly()
