"""Matmuls with GGUF blocks in words for TPUs. Only `kernel` imports Pallas, and only programs for TPUs import that."""

from __future__ import annotations

import jax

from jaxserve_kernels.grouped_matmul.tpu import words_choice as expert_words_choice
from jaxserve_kernels.matmul.tpu import WordsTuning, words_choice

Operand = jax.Array | jax.ShapeDtypeStruct


def choice(x: Operand, words: Operand) -> WordsTuning | None:
    """Return the sizes for a matmul with blocks in words; None: XLA computes it."""
    return words_choice(x, words.shape[1], 4 * words.shape[0])


def grouped_choice(x: Operand, words: Operand) -> WordsTuning | None:
    """Return the sizes for a matmul of rows with the blocks of experts in words; None: XLA computes it."""
    return expert_words_choice(x, words)
