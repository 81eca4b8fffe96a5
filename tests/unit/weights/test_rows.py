"""Weights in 8 bits: the nearest values under one scale a row."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jaxserve.weights.rows import quantize_rows, row_scales

INT8, E4M3 = np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize(("dtype", "largest"), [(INT8, 127), (E4M3, 448)])
@pytest.mark.parametrize("source", [np.float32, ml_dtypes.bfloat16])
def test_the_largest_of_each_row_takes_the_whole_range(dtype: np.dtype, largest: int, source: type) -> None:
    weights = np.random.default_rng(0).standard_normal((5, 64)).astype(source) * np.logspace(-3, 3, 5)[:, None]
    weights = weights.astype(source)
    weights[2] = 0
    values = quantize_rows(weights, dtype).astype(np.float32)
    assert values.shape == weights.shape and quantize_rows(weights, dtype).dtype == dtype
    assert np.abs(values).max(axis=1).tolist() == [largest, largest, 0, largest, largest]
    assert row_scales(weights, dtype)[2] == 1


def test_e4m3_values_are_the_nearest_there_are() -> None:
    """Four significant bits: within a sixteenth of the value, or half of the least step near zero."""
    weights = np.random.default_rng(1).standard_normal((7, 512)).astype(np.float32)
    scales = row_scales(weights, E4M3)[:, None]
    restored = quantize_rows(weights, E4M3).astype(np.float32) * scales
    error = np.abs(restored - weights)
    assert (error <= np.maximum(np.abs(weights) / 16, 2**-10 * scales) * (1 + 1e-5)).all()
    every = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    nearest = np.abs(every[np.isfinite(every)][:, None] - (weights / scales)[:1, :64]).min(axis=0)
    np.testing.assert_allclose(error[0, :64] / scales[0], nearest, atol=1e-4)
