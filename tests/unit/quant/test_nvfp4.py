"""NVFP4 by hand: rounding, the layout on a device, and matmuls that upcast a part at a time."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxserve_kernels import nvfp4 as kernels
from jaxserve_kernels.grouped_matmul import grouped_matmul

from jaxserve.quant.array import MatrixSpec, QuantArray
from jaxserve.quant.formats import _nvfp4_tensors as nvfp4
from jaxserve.quant.formats._mxfp4_tensors import numbers_of, packed
from jaxserve.quant.registry import find_format

FORMAT = find_format("nvfp4-weight-only")
FLOAT32 = np.dtype(np.float32)
SPEC = MatrixSpec(48, 128, ("ffn", "embed"), FLOAT32, FLOAT32)
RANDOM = np.random.default_rng(0)
WEIGHTS = RANDOM.standard_normal((48, 128), np.float32)


def stored(divisor: float = 1.0, factor: float = 1.0) -> QuantArray[np.ndarray]:
    """Return a matrix with any bits but NaN, as a checkpoint may hold it."""
    scales = RANDOM.integers(0, 127, (48, 8)).astype(np.uint8).view(nvfp4.E4M3)
    of_matrix = nvfp4.matrix_scales(48, divisor=divisor, factor=factor)
    return QuantArray(FORMAT, RANDOM.integers(0, 256, (48, 64), np.uint8), scales, matrix_scales=of_matrix)


def scales_on_device(matrix: QuantArray[np.ndarray]) -> kernels.TwoLevelScales:
    on_device = FORMAT.to_device(matrix)
    assert on_device.scales is not None and on_device.matrix_scales is not None
    return kernels.TwoLevelScales(jnp.asarray(on_device.scales), jnp.asarray(on_device.matrix_scales))


def test_weights_are_rounded_under_scales_of_two_levels() -> None:
    """The largest weight is 6 steps of the largest scale, 448; half a step goes to the even number."""
    weights = np.zeros((1, 32), np.float32)
    weights[0, :8] = [2688, 1344, -672, 112, 336, 560, -784, 100]
    weights[0, 16:20] = [6, -5, 1.25, 0.2]
    codes, scales, factor = nvfp4.quantize(weights, 16)
    assert (factor, scales.astype(np.float32).tolist()) == (1, [[448, 1]])
    numbers = numbers_of(codes)[0]
    assert numbers[:8].tolist() == [6, 3, -1.5, 0, 1, 1, -2, 0]
    assert numbers[16:20].tolist() == [6, -4, 1, 0]
    assert not numbers_of(nvfp4.quantize(np.zeros((2, 64), np.float32), 16)[0]).any()
    made = FORMAT.convert(WEIGHTS, FORMAT.declare(SPEC))
    assert np.abs(made.dequantize() - WEIGHTS).mean() < 0.1 * np.abs(WEIGHTS).mean()


@pytest.mark.parametrize(("divisor", "factor"), [(1234.567, 1.0), (1.0, 3.3e-4)])
@pytest.mark.parametrize(("num_input_shards", "block"), [(1, 16), (8, 16), (16, 8)])
def test_stored_bits_are_kept_and_mean_the_same_on_a_device(
    num_input_shards: int, block: int, divisor: float, factor: float
) -> None:
    matrix = stored(divisor, factor)
    declared = FORMAT.declare(replace(SPEC, num_input_shards=num_input_shards))
    made = FORMAT.convert(matrix, declared)
    assert made.values.tobytes() == matrix.values.tobytes()
    np.testing.assert_array_equal(made.dequantize(), matrix.dequantize())
    on_device, random = FORMAT.to_device(made), FORMAT.random(WEIGHTS.ravel(), declared, 1.0)
    assert on_device.scales is not None and on_device.scales.shape == (128 // block, 48)
    for host, device, spec in zip(on_device.arrays, random.arrays, declared.arrays, strict=True):
        assert (host.shape, host.dtype) == (spec.shape, spec.dtype) == (device.shape, device.dtype)
    for compute in (kernels.dequantize, jax.jit(kernels.dequantize, static_argnums=2)):
        wide = compute(jnp.asarray(on_device.values), scales_on_device(made), jnp.float32)
        np.testing.assert_array_equal(wide, matrix.dequantize())


def test_tpus_have_words_of_dense_matrices_with_whole_units_and_lanes() -> None:
    """They hold the stored bits, are rounded as elsewhere, and rows of tables are looked up in them."""
    spec = replace(SPEC, out_dim=128, in_dim=256, platform="tpu")
    declared = FORMAT.declare(spec)
    assert (declared.values.shape, declared.values.dtype) == ((32, 128), np.dtype(np.int32))
    assert declared.values.axes == ("embed", "ffn")
    scales = RANDOM.integers(0, 127, (128, 16)).astype(np.uint8).view(nvfp4.E4M3)
    of_matrix = nvfp4.matrix_scales(128, divisor=300.0)
    matrix = QuantArray(FORMAT, RANDOM.integers(0, 256, (128, 128), np.uint8), scales, matrix_scales=of_matrix)
    on_device = declared.format.to_device(declared.format.convert(matrix, declared))
    np.testing.assert_array_equal(kernels.bytes_of(jnp.asarray(on_device.values)), matrix.values)
    rows = declared.format.lookup(on_device.map(jnp.asarray), jnp.asarray([3, 127, 3]), jnp.float32)
    np.testing.assert_array_equal(rows, matrix.dequantize()[[3, 127, 3]])
    x = RANDOM.standard_normal((3, 256)).astype(np.float32)
    found = declared.format.matmuls(jnp.asarray(x), [on_device.map(jnp.asarray)], jnp.int32(3), "reference")[0]
    np.testing.assert_allclose(found, x @ matrix.dequantize().T, rtol=1e-5, atol=1e-2)
    random = declared.format.random(WEIGHTS.ravel(), declared, 1.0)
    assert [each.shape for each in random.arrays] == [each.shape for each in declared.arrays]
    of_experts = FORMAT.declare(replace(spec, num_experts=2))
    stacked = QuantArray(FORMAT, *(np.stack([each, each]) for each in matrix.arrays[:2]))
    stacked = replace(stacked, matrix_scales=np.stack([of_matrix, of_matrix]))
    words = of_experts.format.to_device(stacked).values
    assert words.shape == of_experts.values.shape == (2, 32, 128)
    np.testing.assert_array_equal(words[1], on_device.values)
    for changes in ({"out_dim": 192}, {"num_input_shards": 2}):
        assert FORMAT.declare(replace(spec, **changes)).values.dtype == np.uint8  # type: ignore[arg-type]


def test_matrices_without_a_block_of_8_inputs_stay_plain() -> None:
    for spec in (replace(SPEC, num_input_shards=32), replace(SPEC, in_dim=100)):
        assert FORMAT.declare(spec).format is find_format("none")


@pytest.mark.parametrize("num_tokens", [1, 3, 70])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_matmul_is_that_of_the_dequantised_matrix(
    num_tokens: int, dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No chunk of 20 outputs divides 48: the last one begins early."""
    monkeypatch.setattr(kernels, "_CHUNK_WEIGHTS", 128 * 20)
    matrix = stored(1000.0)
    x = jnp.asarray(RANDOM.standard_normal((num_tokens, 128)), dtype)
    wide = np.asarray(jnp.asarray(matrix.dequantize(), dtype), np.float64)
    expected, sizes = np.asarray(x, np.float64) @ wide.T, np.abs(np.asarray(x, np.float64)) @ np.abs(wide).T
    for multiply in (kernels.matmul, kernels._whole):
        found = multiply(x, jnp.asarray(matrix.values), scales_on_device(matrix))
        assert (np.abs(np.asarray(found) - expected) <= (1e-6 if dtype == jnp.float32 else 2**-8) * sizes).all()
    weight = FORMAT.to_device(matrix).map(jnp.asarray)
    rows = FORMAT.lookup(weight, jnp.asarray([3, 47, 3]), dtype)
    np.testing.assert_array_equal(np.asarray(rows, np.float64), wide[[3, 47, 3]])


def test_rows_are_multiplied_with_the_matrix_of_their_expert() -> None:
    matrices = [stored(300.0), stored(7.0), stored(1.0, 0.01)]
    x = RANDOM.standard_normal((9, 128)).astype(np.float32)
    on_device = [FORMAT.to_device(matrix).arrays for matrix in matrices]
    values, *scales = (jnp.stack(list(map(jnp.asarray, each))) for each in zip(*on_device, strict=True))
    sizes = np.array([2, 0, 5], np.int32)
    found = grouped_matmul(jnp.asarray(x), values, jnp.asarray(sizes), kernels.TwoLevelScales(*scales))
    wide = [matrix.dequantize().astype(np.float64) for matrix in matrices]
    for row, expert in enumerate(np.repeat(np.arange(3), sizes)):
        error = np.abs(np.asarray(found[row], np.float64) - wide[expert] @ x[row])
        assert (error <= 1e-6 * (np.abs(wide[expert]) @ np.abs(x[row]))).all()


@pytest.mark.parametrize("num_experts", [None, 16])
def test_no_more_is_upcast_than_a_part_of_one_matrix(num_experts: int | None) -> None:
    """A matrix takes 16 MB in float32, and a part of it 2 MB; all experts take 256 MB."""
    lead = () if num_experts is None else (num_experts,)
    shapes = [("uint8", (2048, 1024)), ("float8_e4m3fn", (128, 2048)), ("float32", (2, 2048))]
    values, *scales = (jax.ShapeDtypeStruct((*lead, *shape), jnp.dtype(name)) for name, shape in shapes)
    x, steps = jax.ShapeDtypeStruct((16, 2048), jnp.float32), kernels.TwoLevelScales(*scales)
    lowered = (
        jax.jit(kernels.matmul).lower(x, values, steps)
        if num_experts is None
        else jax.jit(grouped_matmul).lower(x, values, jax.ShapeDtypeStruct((num_experts,), jnp.int32), steps)
    )
    memory = lowered.compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 16 << 20


def test_numbers_of_a_byte_are_those_of_the_specification() -> None:
    """The first is in the low half; ml_dtypes has the type."""
    codes = np.arange(16, dtype=np.uint8)[None]
    scales = kernels.TwoLevelScales(jnp.ones((1, 1), jnp.float8_e4m3fn), jnp.ones((2, 1)))
    found = kernels.dequantize(jnp.asarray(packed(codes)), scales, jnp.float32)
    np.testing.assert_array_equal(found, codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32))
