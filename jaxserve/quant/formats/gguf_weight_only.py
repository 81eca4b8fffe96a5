"""Weights in the blocks of a GGUF file, dequantised in the matmul: the numbers of the file, multiplied as floats."""

from __future__ import annotations

from jaxserve.quant.formats._blocks import BlockFormat


class GgufWeightOnly(BlockFormat):
    """Blocks, activations as they are."""

    name = "gguf-weight-only"


FORMAT = GgufWeightOnly()
