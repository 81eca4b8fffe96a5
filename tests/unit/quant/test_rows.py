"""8-bit weights: the nearest values under one scale per output."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jaxserve.quant.array import ArraySpec, MatrixSpec, QuantArray
from jaxserve.quant.registry import find_format

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def quantized(name: str, weights: np.ndarray) -> QuantArray[np.ndarray]:
    float32 = np.dtype(np.float32)
    spec = MatrixSpec(*weights.shape, (None, None), float32, float32)
    declared: QuantArray[ArraySpec] = find_format(name).declare(spec)
    made = find_format(name).quantize(weights, declared)
    assert [(each.shape, each.dtype) for each in made.arrays] == [(each.shape, each.dtype) for each in declared.arrays]
    return made


@pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("fp8-weight-only", 448)])
@pytest.mark.parametrize("source", [np.float32, ml_dtypes.bfloat16])
def test_the_largest_value_of_each_row_becomes_the_largest_of_the_dtype(name: str, largest: int, source: type) -> None:
    weights = np.random.default_rng(0).standard_normal((5, 64)).astype(source) * np.logspace(-3, 3, 5)[:, None]
    weights = weights.astype(source)
    weights[2] = 0
    made = quantized(name, weights)
    assert np.abs(made.values.astype(np.float32)).max(axis=1).tolist() == [largest, largest, 0, largest, largest]
    assert made.scales is not None and made.scales[2] == 1


def test_e4m3_values_are_the_nearest() -> None:
    """e4m3 has four significant bits: errors are within 1/16 of a value, or half of the smallest step near zero."""
    weights = np.random.default_rng(1).standard_normal((7, 512)).astype(np.float32)
    made = quantized("fp8", weights)
    assert made.scales is not None
    restored, scales = made.dequantize(), made.scales[:, None]
    error = np.abs(restored - weights)
    assert (error <= np.maximum(np.abs(weights) / 16, 2**-10 * scales) * (1 + 1e-5)).all()
    every = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    nearest = np.abs(every[np.isfinite(every)][:, None] - (weights / scales)[:1, :64]).min(axis=0)
    np.testing.assert_allclose(error[0, :64] / scales[0], nearest, atol=1e-4)


def test_matrices_of_all_experts_are_dequantised_with_their_own_scales() -> None:
    values, scales = np.ones((3, 4, 4), E4M3), np.arange(12, dtype=np.float32).reshape(3, 4)
    found = QuantArray(find_format("fp8"), values, scales).dequantize()
    np.testing.assert_array_equal(found, np.broadcast_to(scales[..., None], (3, 4, 4)))
