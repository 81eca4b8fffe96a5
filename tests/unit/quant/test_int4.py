"""4-bit weights: the nearest values under one scale per output and group of inputs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jaxserve.quant.formats.int4_weight_only import group_scales, quantize_groups

BF16 = np.dtype(ml_dtypes.bfloat16)


def random_weights(num_outputs: int, num_inputs: int) -> np.ndarray:
    sizes = np.logspace(-3, 1, num_inputs)
    return (np.random.default_rng(0).standard_normal((num_outputs, num_inputs)) * sizes).astype(np.float32)


def quantized(weights: np.ndarray, num_groups: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    scales = group_scales(weights, num_groups, dtype)
    return quantize_groups(weights, scales), scales


@pytest.mark.parametrize("scale_dtype", [np.dtype(np.float32), BF16, np.dtype(np.float16)])
@pytest.mark.parametrize("source", [np.float32, ml_dtypes.bfloat16])
def test_values_are_the_nearest_under_their_group_scale(scale_dtype: np.dtype, source: type) -> None:
    weights = random_weights(7, 192).astype(source)
    numbers, scales = quantized(weights, 3, scale_dtype)
    assert numbers.shape == weights.shape and numbers.dtype == ml_dtypes.int4
    assert scales.shape == (7, 3) and scales.dtype == scale_dtype
    steps = scales.astype(np.float32).repeat(64, axis=1)
    expected = np.clip(np.rint(weights.astype(np.float32) / steps), -8, 7)
    np.testing.assert_array_equal(numbers.astype(np.float32), expected)


def test_the_farthest_value_of_a_group_is_exact_whatever_its_sign() -> None:
    weights = random_weights(5, 128)
    numbers, scales = quantized(weights, 2, np.dtype(np.float32))
    grouped, restored = weights.reshape(5, 2, 64), numbers.astype(np.float32).reshape(5, 2, 64) * scales[:, :, None]
    farthest = np.abs(grouped).argmax(axis=2, keepdims=True)
    kept = np.take_along_axis(grouped, farthest, axis=2)
    assert (kept > 0).any() and (kept < 0).any()
    np.testing.assert_allclose(np.take_along_axis(restored, farthest, axis=2), kept, rtol=1e-6)
    half_a_step = np.abs(scales[:, :, None]) / 2
    opposite = np.sign(grouped) != np.sign(kept)
    assert (np.abs(restored - grouped) <= half_a_step * np.where(opposite, 2, 1) * (1 + 1e-5)).all()


def test_a_group_of_zeros_is_zeros() -> None:
    weights = random_weights(3, 64)
    weights[1, :32] = 0
    numbers, scales = quantized(weights, 2, BF16)
    assert not numbers[1, :32].astype(np.int8).any()
    assert scales[1, 0] == 1
    assert numbers[1, 32:].astype(np.int8).any()
