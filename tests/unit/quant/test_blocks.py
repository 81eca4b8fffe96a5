"""Matrices in the blocks of GGUF files: which are kept, their layout on a device, and what cannot become blocks."""

from __future__ import annotations

from dataclasses import replace

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels import block_matmul
from jaxserve_kernels.block_kinds import BLOCK_KINDS, BlockKind
from jaxserve_kernels.block_matmul.cases import random_blocks

from jaxserve.errors import CheckpointError
from jaxserve.quant.array import MatrixSpec
from jaxserve.quant.registry import find_format
from jaxserve.quant.stored_blocks import StoredBlocks

FLOAT32 = np.dtype(np.float32)
SPEC = MatrixSpec(48, 512, ("ffn", "embed"), FLOAT32, FLOAT32)
TPU_SPEC = replace(SPEC, out_dim=128, platform="tpu")
dequantize = jax.jit(block_matmul.dequantize, static_argnums=0)
dequantize_tiles = jax.jit(block_matmul.dequantize_tiles, static_argnums=0)
KINDS = pytest.mark.parametrize("kind", BLOCK_KINDS.values(), ids=lambda kind: kind.name)


@KINDS
def test_blocks_of_a_file_are_kept_as_they_are(kind: BlockKind) -> None:
    declared = find_format("gguf").declare(replace(SPEC, stored_kind=kind.name))
    rows = random_blocks(kind, np.random.default_rng(0), 48, 512 // kind.num_inputs)
    stored = StoredBlocks(kind.name, rows, kind.num_inputs, kind.stored_bytes)
    host = declared.format.convert(stored, declared)
    device = declared.format.to_device(host)
    assert (device.values.shape, device.values.dtype) == (declared.values.shape, declared.values.dtype)
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind.name])
    np.testing.assert_array_equal(stored.dequantize(), expected)
    np.testing.assert_array_equal(host.dequantize(), expected)
    np.testing.assert_array_equal(dequantize_tiles(kind, jnp.asarray(device.values)), expected)


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("num_shards", [1, 2])
def test_tpus_have_words_of_the_same_weights(kind: BlockKind, num_shards: int) -> None:
    """Each device has the words of its own inputs if devices split them."""
    spec = replace(TPU_SPEC, stored_kind=kind.name, num_input_shards=num_shards)
    declared = find_format("gguf").declare(spec)
    rows = random_blocks(kind, np.random.default_rng(0), 128, 512 // kind.num_inputs)
    host = declared.format.convert(StoredBlocks(kind.name, rows, kind.num_inputs, kind.stored_bytes), declared)
    device = declared.format.to_device(host)
    assert (device.values.shape, device.values.dtype) == (declared.values.shape, np.dtype(np.int32))
    assert declared.values.axes == ("embed", "ffn")
    shares = [np.asarray(dequantize(kind, jnp.asarray(each))) for each in np.split(device.values, num_shards)]
    np.testing.assert_array_equal(np.concatenate(shares, axis=1), host.dequantize())


@KINDS
@pytest.mark.parametrize("spec", [SPEC, TPU_SPEC], ids=["tiles", "words"])
def test_experts_keep_the_blocks_of_a_matrix_each(kind: BlockKind, spec: MatrixSpec) -> None:
    declared = find_format("gguf").declare(replace(spec, stored_kind=kind.name, num_experts=3))
    rows = random_blocks(kind, np.random.default_rng(0), 3 * spec.out_dim, 512 // kind.num_inputs)
    by_expert = rows.reshape(3, spec.out_dim, -1)
    device = declared.format.to_device(declared.with_arrays([by_expert]))
    assert (device.values.shape, device.values.dtype) == (declared.values.shape, declared.values.dtype)
    assert declared.values.axes[0] == "experts"
    expected = gguf.quants.dequantize(by_expert, gguf.GGMLQuantizationType[kind.name])
    for values, weights in zip(device.values, expected, strict=True):
        np.testing.assert_array_equal(dequantize(kind, jnp.asarray(values)), weights)


@pytest.mark.parametrize("changes", [{"out_dim": 192}, {"in_dim": 512 + 128}, {"num_input_shards": 4}], ids=str)
def test_tpus_have_tiles_of_matrices_without_whole_words_and_lanes(changes: dict[str, int]) -> None:
    spec = replace(TPU_SPEC, stored_kind="Q4_1", **changes)  # type: ignore[arg-type]
    assert find_format("gguf").declare(spec).values.dtype == np.uint8
    assert find_format("gguf").declare(replace(TPU_SPEC, stored_kind="Q4_1")).values.dtype == np.int32


@KINDS
@pytest.mark.parametrize("spec", [SPEC, TPU_SPEC], ids=["tiles", "words"])
@pytest.mark.parametrize("num_experts", [None, 2])
def test_random_blocks_have_the_deviation_asked_for(kind: BlockKind, spec: MatrixSpec, num_experts: int | None) -> None:
    declared = find_format("gguf").declare(replace(spec, stored_kind=kind.name, num_experts=num_experts))
    noise = np.random.default_rng(0).standard_normal(100_003, np.float32)
    made = declared.format.random(noise, declared, 0.25)
    assert made.values.shape == declared.values.shape
    matrices = made.values if num_experts else made.values[None]
    weights = np.stack([np.asarray(dequantize(kind, jnp.asarray(each))) for each in matrices])
    assert abs(weights.std() - 0.25) < 0.02
    assert abs(weights.mean()) < 0.04  # the middle of 16 codes is half a code from one of them


@pytest.mark.parametrize(
    "changes",
    [
        {"stored_kind": None},
        {"stored_kind": "Q2_K"},
        {"out_dim": 40},
        {"num_output_shards": 2},
        {"num_input_shards": 32},
    ],
    ids=str,
)
def test_a_matrix_that_no_kernel_takes_in_blocks_is_plain(changes: dict[str, object]) -> None:
    spec = replace(SPEC, **{"stored_kind": "Q4_1", **changes})  # type: ignore[arg-type]
    assert find_format("gguf").declare(spec).format is find_format("none")
    assert repr(find_format("gguf").declare(replace(SPEC, stored_kind="Q4_1")).format) == "gguf Q4_1"


def test_floats_do_not_become_blocks_of_two_levels() -> None:
    declared = find_format("gguf").declare(replace(SPEC, stored_kind="Q4_K"))
    with pytest.raises(CheckpointError, match=r"not in blocks cannot replace Q4_K blocks; give a GGUF file"):
        declared.format.convert(np.zeros((48, 512), np.float32), declared)
