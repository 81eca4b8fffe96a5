"""Host memory that jax keeps for a CPU without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

_ALIGNMENT: Final = 64
"""jax copies arrays whose address is no multiple of it."""


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return new memory, not initialised, that `jax.device_put` shares with CPU devices."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
