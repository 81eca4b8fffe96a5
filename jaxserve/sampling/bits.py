"""Sets of tokens as bits, 32 to a word: the form in which a device gets and keeps them. No jax."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

WORD_BITS = 32


def num_words(vocab_size: int) -> int:
    """Return the int32 words for one bit per token."""
    return -(-vocab_size // WORD_BITS)


def pack_bits(token_ids: Collection[int], vocab_size: int) -> np.ndarray:
    """Return int32 `[W]` with bit `id % 32` of word `id // 32` set for each of `token_ids`."""
    is_member = np.zeros(num_words(vocab_size) * WORD_BITS, np.bool_)
    is_member[list(token_ids)] = True
    return np.packbits(is_member, bitorder="little").view("<i4").astype(np.int32, copy=False)
