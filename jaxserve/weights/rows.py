"""Symmetric 8-bit weights: one scale per output row, the row's largest value becomes the type's largest."""

from __future__ import annotations

from typing import Final

import numpy as np

_LARGEST: Final = {"int8": 127, "float8_e4m3fn": 448}


def row_scales(weights: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float32 [O] for weights [O, I] in int8 or e4m3; 1 for a row of zeros."""
    largest = np.abs(weights.astype(np.float32, copy=False)).max(axis=1)
    scales: np.ndarray = np.where(largest == 0, np.float32(1), largest / np.float32(_LARGEST[dtype.name]))
    return scales


def quantize_rows(weights: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """[O, I] in `dtype`; times the row's scale each is the value nearest to the weight."""
    scaled = weights.astype(np.float32, copy=False) / row_scales(weights, dtype)[:, None]
    values: np.ndarray = (np.rint(scaled) if dtype == np.int8 else scaled).astype(dtype)
    return values
