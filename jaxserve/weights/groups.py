"""4-bit weights: one scale for each output and group of neighbouring inputs.

The value that is farthest from zero becomes -8, the one of the sixteen numbers that has no opposite: scales may be
negative. That makes steps an eighth of it instead of a seventh.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np


def group_scales(weights: np.ndarray, num_groups: int, dtype: np.dtype) -> np.ndarray:
    """[O, G] of weights [O, I]; 1 for a group of zeros."""
    grouped = _grouped(weights, num_groups)
    farthest = np.abs(grouped).argmax(axis=2, keepdims=True)
    scales = (np.take_along_axis(grouped, farthest, axis=2)[:, :, 0] / np.float32(-8)).astype(dtype)
    scales[scales == 0] = 1
    return scales


def quantize_groups(weights: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """int4 [O, I]: the numbers nearest to the weights under these scales [O, G].

    But for what lies opposite to the farthest value of its group and is rounded down to 7 steps.
    """
    steps = scales.astype(np.float32)[:, :, None]
    numbers = np.clip(np.rint(_grouped(weights, scales.shape[1]) / steps), -8, 7)
    return numbers.astype(ml_dtypes.int4).reshape(weights.shape)


def _grouped(weights: np.ndarray, num_groups: int) -> np.ndarray:
    """float32 [O, G, I / G]."""
    return weights.astype(np.float32, copy=False).reshape(len(weights), num_groups, -1)
