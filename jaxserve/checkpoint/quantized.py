"""A checkpoint whose quantised matrices are read with their scales: one tensor per matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.errors import CheckpointError
from jaxserve.quant.checkpoint import ReadMatrix
from jaxserve.quant.registry import read_form
from jaxserve.quant.tensor import Tensor

_NEEDS_SCALES: Final = "F8_E4M3"
"""A stored dtype that means nothing without a scale."""


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint(CheckpointView):
    """A checkpoint with quantised matrices."""

    matrices: Mapping[str, ReadMatrix]
    """Function that reads each matrix, by name."""

    def read(self, name: str) -> Tensor:
        read = self.matrices.get(name)
        return self.inner.read(name) if read is None else read(self._read_stored)

    def _read_stored(self, name: str) -> np.ndarray:
        tensor = self.inner.read(name)
        assert isinstance(tensor, np.ndarray), "quantised once only"
        return tensor


def with_quantized_matrices(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with each matrix and its scales as one tensor; unchanged if nothing is quantised.

    Raises CheckpointError in one line if a scale is missing or has another shape, or no format reads the checkpoint.
    """
    form, tensors = read_form(checkpoint.config), dict(checkpoint.tensors)
    matrices = {} if form is None else form.take_matrices(tensors)
    if any(info.stored_dtype == _NEEDS_SCALES and name not in matrices for name, info in tensors.items()):
        raise CheckpointError(
            f"{checkpoint.path}: {_NEEDS_SCALES} tensors, but no quantization_config that says what they are"
        )
    return QuantizedCheckpoint(checkpoint, tensors, matrices) if matrices else checkpoint
