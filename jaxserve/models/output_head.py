"""Tells if a checkpoint stores an output head of its own although its config says that the embedding matrix is the head."""

from __future__ import annotations

from typing import Final

import numpy as np

from jaxserve.checkpoint.converted import converted_of
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.renamed import EMBEDDING, HEAD

_ROWS: Final = 4096
"""Rows that are compared at a time."""


def has_own_head(checkpoint: Checkpoint) -> bool:
    """Return True if the checkpoint stores an output head that is not its embedding matrix.

    Fine-tuning and merging can part the two and leave `tie_word_embeddings` true; transformers 5 then goes by the numbers, too.
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
    return not all(np.array_equal(ours[row : row + _ROWS], theirs[row : row + _ROWS]) for row in starts)
