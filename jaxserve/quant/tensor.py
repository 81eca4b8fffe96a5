"""A checkpoint's tensors: described by a header, then read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the validated header describes it, in Hugging Face's name and shape."""

    name: str
    shape: tuple[int, ...]
    stored_dtype: str
    """Type named by the file: "F32", "BF16", "Q4_1", ..."""
    num_stored_bytes: int
    file: Path
    is_quantized: bool = False
    """True if `Checkpoint.read` returns its quantised values; False: it returns a float array."""


class QuantizedTensor(Protocol):
    """A quantised tensor of a checkpoint."""

    def __getitem__(self, index: Any) -> QuantizedTensor:
        """Index the first dimensions: a matrix of a stack, or rows of a matrix."""
        ...

    def columns(self, inputs: range, num_inputs: int) -> QuantizedTensor | None:
        """Return the weights of some inputs of all; None if these end within a block or group of inputs, or a byte."""
        ...

    def dequantize(self) -> np.ndarray:
        """Return `[out, in]` weights in a float dtype."""
        ...


Tensor = np.ndarray | QuantizedTensor
"""A tensor of a checkpoint."""


def scaled(part: range, size: int, to_size: int) -> range | None:
    """Return the part of an axis of `to_size` that is this part of one of `size`; None if it does not begin and end at whole numbers."""
    if part.start * to_size % size or part.stop * to_size % size:
        return None
    return range(part.start * to_size // size, part.stop * to_size // size)


def as_floats(tensor: Tensor) -> np.ndarray:
    """Return a tensor in a float dtype: dequantised if it is quantised."""
    return tensor if isinstance(tensor, np.ndarray) else tensor.dequantize()
