"""Weights in the blocks of a GGUF file, and activations rounded to int8, every 32 of a token by their largest value."""

from __future__ import annotations

from typing import ClassVar

from jaxserve.quant.formats._blocks import BlockFormat


class Gguf(BlockFormat):
    """Blocks and int8 activations: sums of a block are exact in int32, as llama.cpp computes them."""

    name = "gguf"
    quantizes_activations = True
    arithmetic: ClassVar[str | None] = "int8"


FORMAT = Gguf()
