"""fp8 with a scale per block: scales of odd blocks, groups of each device, and the same weights on the device."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxserve_kernels.matmul import matmul

from jaxserve.quant.array import MatrixSpec, QuantArray
from jaxserve.quant.formats.fp8_block_weight_only import stored_scales
from jaxserve.quant.registry import find_format

FORMAT = find_format("fp8-block-weight-only")
FLOAT32 = np.dtype(np.float32)
SPEC = MatrixSpec(72, 192, ("ffn", "embed"), FLOAT32, FLOAT32, group_size=64)
RANDOM = np.random.default_rng(0)
WEIGHTS = RANDOM.standard_normal((72, 192), np.float32)
BLOCKS = RANDOM.uniform(0.5, 2, (3, 3)).astype(np.float32)
"""Scales of blocks of 32 outputs and 64 inputs; the last ones have 8 outputs."""
STORED = QuantArray(FORMAT, WEIGHTS.astype(ml_dtypes.float8_e4m3fn), stored_scales(BLOCKS, (32, 64), (72, 192)))


@pytest.mark.parametrize(
    ("block", "shape", "num_groups"),
    [((32, 64), (72, 192), 3), ((128, 128), (576, 576), 9), ((48, 40), (50, 100), 5), ((128, 128), (7, 96), 1)],
)  # fmt: skip
def test_every_weight_has_the_scale_of_its_block(
    block: tuple[int, int], shape: tuple[int, int], num_groups: int
) -> None:
    counts = tuple(-(-size // of) for size, of in zip(shape, block, strict=True))
    blocks = np.arange(1, 1 + counts[0] * counts[1], dtype=np.float32).reshape(counts)
    scales = stored_scales(blocks, block, shape)
    assert scales.shape == (shape[0], num_groups)
    found = QuantArray(FORMAT, np.ones(shape, ml_dtypes.float8_e4m3fn), scales).dequantize()
    rows, columns = np.indices(shape)
    np.testing.assert_array_equal(found, blocks[rows // block[0], columns // block[1]])


@pytest.mark.parametrize(("num_input_shards", "group"), [(1, 64), (3, 64), (2, 32), (4, 16)])
def test_stored_numbers_and_scales_are_kept_in_groups_that_no_device_cuts(num_input_shards: int, group: int) -> None:
    declared = FORMAT.declare(replace(SPEC, num_input_shards=num_input_shards))
    assert declared.format is FORMAT
    made = FORMAT.convert(STORED, declared)
    assert made.values.tobytes() == STORED.values.tobytes()
    np.testing.assert_array_equal(made.dequantize(), STORED.dequantize())
    on_device = FORMAT.to_device(made)
    assert on_device.scales is not None and on_device.scales.shape == (192 // group, 72)
    for array, spec in zip(on_device.arrays, declared.arrays, strict=True):
        assert (array.shape, array.dtype) == (spec.shape, spec.dtype)


def test_a_scale_of_outputs_is_that_of_their_groups() -> None:
    """A checkpoint may have both."""
    rows = find_format("fp8").convert(WEIGHTS, find_format("fp8").declare(SPEC))
    made = FORMAT.convert(rows, FORMAT.declare(SPEC))
    np.testing.assert_array_equal(made.dequantize(), rows.dequantize())


def test_blocks_of_another_size_are_rounded_again() -> None:
    declared = FORMAT.declare(replace(SPEC, group_size=192))
    made = FORMAT.convert(STORED, declared)
    assert made.scales is not None and made.scales.shape == (72, 1)
    error = np.abs(made.dequantize() - STORED.dequantize())
    assert 0 < error.max() <= np.abs(STORED.dequantize()).max() / 16


def test_matrices_without_a_group_of_16_inputs_stay_plain() -> None:
    for spec in (replace(SPEC, num_input_shards=24), replace(SPEC, in_dim=200), replace(SPEC, group_size=8)):
        assert FORMAT.declare(spec).format is find_format("none")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_matmul_and_rows_of_a_table_are_those_of_the_dequantised_matrix(dtype: type) -> None:
    on_device = FORMAT.to_device(FORMAT.convert(STORED, FORMAT.declare(SPEC))).map(jnp.asarray)
    wide = STORED.dequantize()
    x = jnp.asarray(RANDOM.standard_normal((5, 192)), dtype)
    found = FORMAT.matmuls(x, [on_device], jnp.int32(5), "reference")[0]
    expected = np.asarray(x, np.float64) @ wide.astype(np.float64).T
    sizes = np.abs(np.asarray(x, np.float64)) @ np.abs(wide).astype(np.float64).T
    assert (np.abs(np.asarray(found) - expected) <= (1e-6 if dtype == jnp.float32 else 2**-8) * sizes).all()
    rows = FORMAT.lookup(on_device, jnp.asarray([3, 71, 3]), dtype)
    np.testing.assert_array_equal(rows, jnp.asarray(wide[[3, 71, 3]], dtype))


@pytest.mark.parametrize("num_tokens", [1, 3, 64, 200])
def test_a_cpu_upcasts_chunks_of_outputs_and_leaves_none_out(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No chunk divides the outputs: the last one begins early."""
    monkeypatch.setattr("jaxserve_kernels.matmul.reference._CHUNK_WEIGHTS", 192 * 20)
    x = RANDOM.standard_normal((num_tokens, 192)).astype(np.float32)
    stored = FORMAT.to_device(STORED)
    found = matmul(jnp.asarray(x), jnp.asarray(stored.values), jnp.asarray(stored.scales))
    wide = STORED.dequantize().astype(np.float64)
    assert (np.abs(np.asarray(found) - x @ wide.T) <= 1e-6 * (np.abs(x) @ np.abs(wide).T)).all()
