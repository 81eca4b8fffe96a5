"""The ops in numpy and float64: what devices are compared with. Written from their definitions, not from the code."""

from __future__ import annotations

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


def attend(
    queries: np.ndarray,  # (T, N, H) of one row, the last one at position `length - 1`
    keys: np.ndarray,  # (X, K, H), X >= length
    values: np.ndarray,
    length: int,
    scale: float,
    window: int | None,
) -> np.ndarray:
    """Causal softmax attention of one row, query by query: (T, N, H) in float64."""
    count, num_heads, dim = queries.shape
    num_kv_heads = keys.shape[1]
    queries, keys, values = (array.astype(np.float64) for array in (queries, keys, values))
    out = np.empty((count, num_heads, dim))
    for index in range(count):
        position = length - count + index
        first = 0 if window is None else max(0, position - window + 1)
        seen_keys, seen_values = keys[first : position + 1], values[first : position + 1]
        grouped = queries[index].reshape(num_kv_heads, -1, dim) * scale
        scores = np.einsum("kgh,xkh->kgx", grouped, seen_keys)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[index] = np.einsum("kgx,xkh->kgh", weights, seen_values).reshape(num_heads, dim)
    return out


def rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """(T, N, H) turned by (T, H/2): pairs are (i, i + H/2)."""
    first, second = np.split(x.astype(np.float64), 2, -1)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def quantise(x: np.ndarray) -> np.ndarray:
    """Rows to 8 bits by their largest value, and back."""
    steps = np.abs(x.astype(np.float64)).max(-1, keepdims=True) / 127
    rounded: np.ndarray = np.rint(x.astype(np.float64) / steps) * steps
    return rounded
