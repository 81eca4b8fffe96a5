"""Matmuls with GGUF blocks in words for TPUs. Only `kernel` imports Pallas, and only programs for TPUs import that."""

from __future__ import annotations

import jax

from jaxserve_kernels.matmul.tpu import WordsTuning, words_choice

Operand = jax.Array | jax.ShapeDtypeStruct


def choice(x: Operand, words: Operand) -> WordsTuning | None:
    """Return the sizes for a matmul with blocks in words; None: XLA computes it."""
    return words_choice(x, words.shape[1], 4 * words.shape[0])
