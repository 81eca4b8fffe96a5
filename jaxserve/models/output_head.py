"""Tells if a checkpoint stores an output head of its own although its config says that the embedding matrix is the head."""

from __future__ import annotations

from typing import Final

import numpy as np

from jaxserve.checkpoint.converted import converted_of
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.renamed import EMBEDDING, HEAD

_ROWS: Final = 512
"""Rows that are compared at a time."""


def has_own_head(checkpoint: Checkpoint) -> bool:
    """Return True if the checkpoint stores an output head that is not its embedding matrix.

    Fine-tuning and merging can part the two and leave `tie_word_embeddings` true; transformers 5 then goes by the numbers, too.
    Both are read as far as they are equal: ask once for a checkpoint.
    """
    head, embedding = checkpoint.tensors.get(HEAD), checkpoint.tensors.get(EMBEDDING)
    if head is None or embedding is None:
        return False
    if converted_of(checkpoint) is not None:  # It lists what the parameters were made of.
        return True
    if head.is_quantized or embedding.is_quantized or head.shape != embedding.shape:
        return True
    ours, theirs = np.asarray(checkpoint.read(HEAD)), np.asarray(checkpoint.read(EMBEDDING))
    starts = range(0, len(ours), _ROWS)
    return ours.dtype != theirs.dtype or not all(
        np.array_equal(_bytes(ours[row : row + _ROWS]), _bytes(theirs[row : row + _ROWS])) for row in starts
    )


def _bytes(rows: np.ndarray) -> np.ndarray:
    """Return the bytes of some rows: comparing numbers of ml_dtypes takes several times as long."""
    return np.ascontiguousarray(rows).view(np.uint8)
