"""Weights in the blocks of GGUF files: dequantised bit by bit as the gguf package does, and rows that ignore their neighbours."""

from __future__ import annotations

from functools import partial

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels import block_matmul as ops
from jaxserve_kernels import native
from jaxserve_kernels.block_kinds import BLOCK_KINDS, TILE, BlockKind, pack_tiles
from jaxserve_kernels.block_matmul.cases import random_blocks

pytestmark = pytest.mark.slow

dequantize_tiles, dequantize_rows = (
    jax.jit(op, static_argnums=0) for op in (ops.dequantize_tiles, ops.dequantize_rows)
)
_STATIC = ("kind", "dynamic", "backend")
block_matmul, block_matmuls, grouped_block_matmul = (
    jax.jit(op, static_argnames=_STATIC) for op in (ops.block_matmul, ops.block_matmuls, ops.grouped_block_matmul)
)
KINDS = pytest.mark.parametrize("kind", BLOCK_KINDS.values(), ids=lambda kind: kind.name)
NUM_ROWS, NUM_BLOCKS = 48, 3  # more inputs than the kernel dequantises at a time, for blocks of 256


def _stored(kind: BlockKind) -> np.ndarray:
    return random_blocks(kind, np.random.default_rng(kind.index), NUM_ROWS, NUM_BLOCKS)


@KINDS
def test_tiles_dequantise_to_the_bits_of_the_gguf_package(kind: BlockKind) -> None:
    stored = _stored(kind)
    expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind.name])
    np.testing.assert_array_equal(dequantize_tiles(kind, jnp.asarray(pack_tiles(kind, stored))), expected)


@KINDS
def test_looked_up_rows_are_those_of_the_whole_matrix(kind: BlockKind) -> None:
    tiles = jnp.asarray(pack_tiles(kind, _stored(kind)))
    rows = np.array([17, 0, 47, 17])
    np.testing.assert_array_equal(
        dequantize_rows(kind, tiles, jnp.asarray(rows)), np.asarray(dequantize_tiles(kind, tiles))[rows]
    )


@KINDS
def test_tiles_take_the_bytes_of_the_file(kind: BlockKind) -> None:
    tiles = pack_tiles(kind, _stored(kind))
    assert tiles.shape == (NUM_ROWS // TILE, NUM_BLOCKS, kind.tile_bytes)
    assert kind.tile_bytes <= 1.03 * TILE * kind.stored_bytes  # 6-bit factors of two levels take a byte each


@KINDS
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_row_has_the_same_bits_alone_and_among_others(kind: BlockKind, dynamic: bool) -> None:
    if not native.has("jaxserve_block_matmul"):
        pytest.skip("the native kernels are not built")
    tiles = jnp.asarray(pack_tiles(kind, _stored(kind)))
    x = np.random.default_rng(1).normal(size=(29, NUM_BLOCKS * kind.num_inputs)).astype(np.float32)

    def compute(rows: slice, count: int) -> np.ndarray:
        return np.asarray(
            block_matmul(jnp.asarray(x[rows]), tiles, jnp.int32(count), kind=kind, dynamic=dynamic, backend="native")
        )

    together = compute(slice(None), 29)
    for start, count in ((0, 1), (5, 2), (7, 13)):
        np.testing.assert_array_equal(compute(slice(start, start + count), count), together[start : start + count])
    padded = compute(slice(None), 4)
    np.testing.assert_array_equal(padded[:4], together[:4])
    assert not padded[4:].any()


@KINDS
@pytest.mark.parametrize("byte", [0, 255])
def test_the_largest_codes_times_the_largest_inputs_are_exact(kind: BlockKind, byte: int) -> None:
    """Kernels that add products of bytes in 16 bits have to widen them in time."""
    if not native.has("jaxserve_block_matmul"):
        pytest.skip("the native kernels are not built")
    tiles = pack_tiles(kind, _stored(kind))
    tiles[..., : kind.num_groups * kind.code_bytes] = byte
    x = jnp.ones((3, NUM_BLOCKS * kind.num_inputs), jnp.float32).at[1].multiply(-1.0).at[2, ::2].multiply(-1.0)
    made = block_matmul(x, jnp.asarray(tiles), kind=kind, dynamic=True, backend="native")
    expected = block_matmul(x, jnp.asarray(tiles), kind=kind, dynamic=True)
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-5 * float(jnp.abs(expected).max()))


@KINDS
@pytest.mark.parametrize("dynamic", [False, True])
def test_matmuls_of_one_input_are_one_call_with_the_bits_of_each(kind: BlockKind, dynamic: bool) -> None:
    if not native.has("jaxserve_block_matmul"):
        pytest.skip("the native kernels are not built")
    all_tiles = jnp.asarray(pack_tiles(kind, _stored(kind)))
    parts = [all_tiles[:1], all_tiles, all_tiles[1:]]
    x = jnp.asarray(np.random.default_rng(1).normal(size=(14, NUM_BLOCKS * kind.num_inputs)).astype(np.float32))
    together = partial(block_matmuls, kind=kind, dynamic=dynamic, backend="native")
    assert jax.jit(together).lower(x, parts, jnp.int32(13)).as_text().count("custom_call @jaxserve_block") == 1
    for tiles, y in zip(parts, together(x, parts, jnp.int32(13)), strict=True):
        alone = block_matmul(x, tiles, jnp.int32(13), kind=kind, dynamic=dynamic, backend="native")
        np.testing.assert_array_equal(y, alone)


@KINDS
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_row_of_an_expert_has_the_bits_of_a_matmul_with_its_matrix(kind: BlockKind, dynamic: bool) -> None:
    """The native kernel ignores what other experts have."""
    if not native.has("jaxserve_block_matmul"):
        pytest.skip("the native kernels are not built")
    tiles = jnp.asarray(pack_tiles(kind, _stored(kind)))[:, None]  # three experts, each with a tile of outputs
    x = jnp.asarray(np.random.default_rng(1).normal(size=(24, NUM_BLOCKS * kind.num_inputs)).astype(np.float32))
    multiply = partial(block_matmul, kind=kind, dynamic=dynamic, backend="native")
    sizes = jnp.array([5, 0, 17])
    found = np.asarray(grouped_block_matmul(x, tiles, sizes, kind=kind, dynamic=dynamic, backend="native"))
    np.testing.assert_array_equal(found[:5], multiply(x[:5], tiles[0]))
    np.testing.assert_array_equal(found[7:8], multiply(x[7:8], tiles[2]))
    np.testing.assert_array_equal(found[5:22], multiply(x[5:22], tiles[2]))
    assert not found[22:].any()
