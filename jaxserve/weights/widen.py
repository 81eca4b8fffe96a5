"""What a stored tensor is worth."""

from __future__ import annotations

import numpy as np

from jaxserve.checkpoint.fp8 import ROW_SCALES
from jaxserve.checkpoint.int4 import OFFSETS
from jaxserve.checkpoint.protocol import Checkpoint


def widened(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """float32 where the checkpoint has scales for it, as stored where not."""
    values = checkpoint.read(name)
    if name + ROW_SCALES not in checkpoint.tensors:
        return values
    scales, wide = checkpoint.read(name + ROW_SCALES), values.astype(np.float32, order="C")
    if scales.ndim == 1:
        wide *= scales[:, None]
        return wide
    by_group = wide.reshape(*scales.shape, -1)  # a view: what it is multiplied with, `wide` is
    by_group *= scales[:, :, None]
    if name + OFFSETS in checkpoint.tensors:
        by_group += checkpoint.read(name + OFFSETS)[:, :, None]
    return wide
