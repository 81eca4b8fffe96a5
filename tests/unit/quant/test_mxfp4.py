"""MXFP4 by hand: numbers, scales, rounding, and the layout of each device."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxserve_kernels import mxfp4 as kernels

from jaxserve.quant.array import MatrixSpec, QuantArray
from jaxserve.quant.formats import _mxfp4_tensors as mxfp4
from jaxserve.quant.registry import find_format

FORMAT = find_format("mxfp4-weight-only")
FLOAT32 = np.dtype(np.float32)
SPEC = MatrixSpec(48, 128, ("expert_ffn", "embed"), FLOAT32, FLOAT32, num_experts=2)
WEIGHTS = np.random.default_rng(0).standard_normal((48, 128), np.float32)
CODES = np.arange(16, dtype=np.uint8)


def test_numbers_and_scales_are_those_of_the_specification_on_host_and_device() -> None:
    """ml_dtypes has both types."""
    numbers = CODES.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert mxfp4.numbers_of(CODES).tobytes() == numbers.tobytes(), "also the sign of zero"
    for values in (mxfp4.packed(CODES), mxfp4.as_places(CODES)):
        places = kernels.places_of(jnp.asarray(values[None]))
        for dtype in (jnp.float32, jnp.bfloat16):
            on_device = kernels.numbers_at(places.astype(dtype)).astype(jnp.float32)
            np.testing.assert_array_equal(on_device[0], numbers)
    exponents = np.arange(256, dtype=np.uint8)
    scales = exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(mxfp4.scales_of(exponents), scales)
    np.testing.assert_array_equal(kernels.scales_of(jnp.asarray(exponents)), scales)
    assert np.isnan(scales[255])


def test_weights_are_rounded_to_the_nearest_number_ties_to_even() -> None:
    block = np.zeros((1, 32), np.float32)
    block[0, :9] = [0.25, 0.3, 0.75, -1.25, 1.75, 2.5, 3.5, 5, 7.5]  # the largest has exponent 2: the scale is 1
    codes, exponents = mxfp4.quantize(block, 32)
    assert exponents.tolist() == [[127]]
    assert mxfp4.numbers_of(codes)[0, :9].tolist() == [0, 0.5, 1, -1, 2, 2, 4, 4, 6]
    codes, exponents = mxfp4.quantize(2.0**-9 * block, 32)
    assert exponents.tolist() == [[118]]
    assert not mxfp4.numbers_of(mxfp4.quantize(np.zeros((2, 64), np.float32), 32)[0]).any()


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(("num_input_shards", "block"), [(1, 32), (4, 32), (8, 16), (16, 8)])
def test_stored_bits_are_kept_in_the_layout_of_the_device(platform: str, num_input_shards: int, block: int) -> None:
    codes, exponents = mxfp4.quantize(WEIGHTS, 32)
    stored = QuantArray(FORMAT, mxfp4.packed(codes), exponents)
    declared = FORMAT.declare(replace(SPEC, platform=platform, num_input_shards=num_input_shards))
    assert declared.format is FORMAT
    made = FORMAT.convert(stored, declared)
    np.testing.assert_array_equal(made.dequantize(), stored.dequantize())
    assert stored.dequantize().dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(mxfp4.numbers_of(mxfp4.unpacked(made.values)), mxfp4.numbers_of(codes))
    on_device, random = FORMAT.to_device(made), FORMAT.random(WEIGHTS.ravel(), declared, 1.0)
    assert on_device.scales is not None and on_device.scales.shape == (128 // block, 48)
    for host, device, spec in zip(on_device.arrays, random.arrays, declared.arrays, strict=True):
        assert ((2, *host.shape), host.dtype) == (spec.shape, spec.dtype) == (device.shape, device.dtype)
    assert declared.values.num_bytes == 2 * 48 * 128 // 2, "two numbers take a byte"
    wide = kernels.dequantize(jnp.asarray(on_device.values), jnp.asarray(on_device.scales), jnp.float32)
    np.testing.assert_array_equal(wide, stored.dequantize().astype(np.float32))


def test_floats_are_rounded_to_what_a_checkpoint_would_hold() -> None:
    declared = FORMAT.declare(SPEC)
    made = FORMAT.convert(WEIGHTS, declared)
    kept = FORMAT.convert(QuantArray(FORMAT, *made.arrays), declared)
    np.testing.assert_array_equal(kept.dequantize(), made.dequantize())
    error = np.abs(made.dequantize().astype(np.float32) - WEIGHTS)
    assert error.mean() < 0.15 * np.abs(WEIGHTS).mean()


def test_matrices_that_are_not_of_experts_or_do_not_divide_stay_plain() -> None:
    for spec in (replace(SPEC, num_experts=None), replace(SPEC, num_input_shards=32), replace(SPEC, in_dim=100)):
        assert FORMAT.declare(spec).format is find_format("none")
