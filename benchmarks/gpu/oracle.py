"""The ops in numpy and float64: what devices are compared with. Written from their definitions, not from the code."""

from __future__ import annotations

import ml_dtypes
import numpy as np

TOLERANCES = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 2e-2}
"""Most relative error of one vector, by the type that operands are rounded to."""


def vector_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The worst vector along the last axis: length of its difference over the expected length. NaN never passes."""
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    lengths = np.linalg.norm(expected, axis=-1)
    errors = np.linalg.norm(found - expected, axis=-1) / np.maximum(lengths, 1e-30)
    errors = np.where(lengths == 0, np.abs(found).max(-1), errors)
    return float(np.nan_to_num(errors, nan=np.inf).max(initial=0.0))


def rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """(T, N, H) turned by (T, H/2): pairs are (i, i + H/2)."""
    first, second = np.split(x.astype(np.float64), 2, -1)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def quantise(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Rows to int8 or e4m3 by their largest value, and back."""
    is_int8 = dtype == np.int8
    steps = np.abs(x.astype(np.float64)).max(-1, keepdims=True) / (127 if is_int8 else 448)
    scaled = x.astype(np.float64) / steps
    rounded: np.ndarray = (np.rint(scaled) if is_int8 else scaled.astype(dtype).astype(np.float64)) * steps
    return rounded


def stored(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x as a page keeps it: a number, the nearest in the type's range."""
    is_integer = dtype.kind == "i"
    info = np.iinfo(dtype) if is_integer else ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    numbers = np.clip(np.nan_to_num(x.astype(np.float32)), float(info.min), float(info.max))
    return (np.rint(numbers) if is_integer else numbers).astype(dtype)
