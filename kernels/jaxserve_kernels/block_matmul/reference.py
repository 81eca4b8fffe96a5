"""block_matmul in plain jax.numpy: the specification, and the implementation wherever there is no kernel.

XLA dequantises the matrix before the matmul: memory holds the blocks, and every step writes and reads the weights in
the activations' dtype.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32, UInt8

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.block_kinds import GROUP, TILE, BlockKind
from jaxserve_kernels.block_matmul.tpu import upcast
from jaxserve_kernels.grouped_matmul.reference import over_tiles
from jaxserve_kernels.matmul.tpu import take_columns

_LARGEST = 127


Blocks = UInt8[Array, "R B Y"] | Int32[Array, "W O"]
"""A matrix in tiles (`block_kinds`) or in words (`tpu_words`)."""
ExpertBlocks = UInt8[Array, "E R B Y"] | Int32[Array, "E W O"]
"""The matrices of experts."""


def block_matmul(x: Float[Array, "T I"], blocks: Blocks, *, kind: BlockKind, dynamic: bool) -> Float[Array, "T O"]:
    """See `api.block_matmul`."""
    rounded = round_inputs(x) if dynamic else x
    weight = dequantize(kind, blocks).astype(x.dtype)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("ti,oi->to", rounded, weight, precision=precision, preferred_element_type=jnp.float32)


def grouped_block_matmul(
    x: Float[Array, "T I"], blocks: ExpertBlocks, group_sizes: Int[Array, "E"], *, kind: BlockKind, dynamic: bool
) -> Float[Array, "T O"]:
    """See `api.grouped_block_matmul`: the matrix of one expert at a time is dequantised."""
    rounded = round_inputs(x) if dynamic else x
    num_outputs = blocks.shape[2] if are_words(blocks) else TILE * blocks.shape[1]

    def multiply(rows: Float[Array, "T I"], expert: Int[Array, ""]) -> Float[Array, "T O"]:
        return block_matmul(rows, blocks[expert], kind=kind, dynamic=False)

    def compute(*, has_fixed_count: bool) -> Array:
        return over_tiles(rounded, group_sizes, num_outputs, multiply, has_fixed_count=has_fixed_count)

    result: Array = jax.lax.platform_dependent(
        cuda=partial(compute, has_fixed_count=True), default=partial(compute, has_fixed_count=False)
    )
    return result


def round_inputs(x: Float[Array, "T I"]) -> Float[Array, "T I"]:
    """Round every 32 inputs to 8 bits: the largest of them becomes 127 steps."""
    groups = x.astype(jnp.float32).reshape(len(x), -1, GROUP)
    scales = jnp.maximum(jnp.abs(groups).max(-1, keepdims=True), 1e-30) / _LARGEST
    return (jnp.round(groups / scales) * scales).reshape(x.shape).astype(x.dtype)


def are_words(blocks: Blocks | ExpertBlocks) -> bool:
    """Return True for words, False for tiles."""
    return bool(blocks.dtype == jnp.int32)


def dequantize(kind: BlockKind, blocks: Blocks) -> Float[Array, "O I"]:
    """Return a matrix in float32, every weight as ggml dequantises it."""
    if not are_words(blocks):
        return dequantize_tiles(kind, blocks)
    by_input = upcast.upcast(kind, *upcast.by_unit(kind, blocks))  # (U, I / U, O)
    return by_input.reshape(-1, blocks.shape[1]).T


def dequantize_tiles(kind: BlockKind, tiles: UInt8[Array, "*E R B Y"]) -> Float[Array, "*E O I"]:
    """Return the weights in float32, every one as ggml dequantises it."""
    *experts, num_tiles, num_blocks, _ = tiles.shape
    weights = _weights(kind, _take_apart(kind, tiles))  # (*E, R, 16, B, I / B)
    return weights.reshape(*experts, num_tiles * TILE, num_blocks * kind.num_inputs)


def dequantize_rows(
    kind: BlockKind, blocks: Blocks, rows: Int[Array, "T"], backend: Backend = "reference"
) -> Float[Array, "T I"]:
    """Return some outputs' weights in float32: rows of an embedding table. Only their words, or the tiles that hold them, are read."""
    if are_words(blocks):
        return dequantize(kind, take_columns(blocks, rows, backend))

    def take_output(array: Array, output: Int[Array, ""]) -> Array:
        return jax.lax.dynamic_slice_in_dim(array, output, 1, axis=-2)

    parts = _take_apart(kind, blocks[rows // TILE])
    own = _Parts(*(jax.vmap(take_output)(part, rows % TILE) for part in parts))
    return _weights(kind, own).reshape(len(rows), -1)


class ScaledCodes(NamedTuple):
    """Weights as codes and what they are scaled with: `codes * steps - offsets`. G: groups of inputs with a scale."""

    codes: Int[Array, "O I"]
    """Less their zero."""
    steps: Float[Array, "O G"]
    offsets: Float[Array, "O G"] | None


def scaled_codes(kind: BlockKind, tiles: UInt8[Array, "R B Y"]) -> ScaledCodes:
    """Take weights apart into codes and float32 scales."""

    def by_output(array: Array) -> Array:  # (R, B, G, 16)
        return jnp.moveaxis(array, -1, 1).reshape(TILE * len(tiles), -1)

    parts = _take_apart(kind, tiles)
    codes = jnp.moveaxis(_codes(kind, parts), -2, 1).reshape(TILE * len(tiles), -1)  # from (R, B, S, 16, 4)
    d, m = _scales(kind, parts)
    return ScaledCodes(codes.astype(jnp.int32) - kind.zero, by_output(d), by_output(m) if kind.has_minimum else None)


class _Parts(NamedTuple):
    """Tiles, taken apart. N: outputs of a tile; Z: bytes of a number."""

    codes: UInt8[Array, "*R B G V N 4"]  # groups, vectors
    factors: UInt8[Array, "*R B F N 1"]  # of d and m
    floats: UInt8[Array, "*R B M N 2"]  # d and m


def _take_apart(kind: BlockKind, tiles: UInt8[Array, "*R B Y"]) -> _Parts:
    shape, codes_end = tiles.shape[:-1], kind.num_groups * kind.code_bytes
    floats_start = kind.tile_bytes - 2 * TILE * (1 + kind.has_minimum)
    return _Parts(
        tiles[..., :codes_end].reshape(*shape, kind.num_groups, -1, TILE, 4),
        tiles[..., codes_end:floats_start].reshape(*shape, -1, TILE, 1),
        tiles[..., floats_start:].reshape(*shape, -1, TILE, 2),
    )


def _weights(kind: BlockKind, parts: _Parts) -> Float[Array, "*R N B I"]:
    """Return the weights of each block."""
    d, m = _scales(kind, parts)  # (*R, B, scales of a block, N)
    codes = _codes(kind, parts).astype(jnp.float32)  # (*R, B, 8 steps of each group, N, 4)
    *shape, num_steps, num_outputs, _ = codes.shape
    by_scale = codes.reshape(*shape, d.shape[-2], -1, num_outputs, 4)
    d, m = d[..., None, :, None], m[..., None, :, None]
    weights = d * by_scale - m if kind.has_minimum else d * (by_scale - kind.zero)
    weights = jnp.moveaxis(weights.reshape(*shape, num_steps, num_outputs, 4), -2, -4)  # (*R, N, B, steps, 4)
    return weights.reshape(*weights.shape[:-2], -1)


def _codes(kind: BlockKind, parts: _Parts) -> UInt8[Array, "*R B S N 4"]:
    """Return the unsigned codes; S: steps of 4 inputs."""
    own = parts.codes[..., None, :, :]
    shape, tile = own.shape[:-5], own.shape[-2:]
    if kind.bits == 8:
        return own.reshape(*shape, -1, *tile)
    nibbles, upper = own[..., :4, :, :, :], own[..., 4:, :, :, :]
    low = jnp.concatenate([nibbles & 15, nibbles >> 4], axis=-3).reshape(*shape, -1, *tile)
    width = kind.bits - 4
    if width == 0:
        return low
    shifts = jnp.arange(0, 8, width, dtype=jnp.uint8)[:, None, None]
    high = (upper >> shifts & (1 << width) - 1).reshape(*shape, -1, *tile)
    return low | high << 4


def _scales(kind: BlockKind, parts: _Parts) -> tuple[Float[Array, "*R B S N"], Float[Array, "*R B M N"]]:
    """Return d and m in float32; m is zeros for types without it."""
    floats = jax.lax.bitcast_convert_type(parts.floats, jnp.float16).astype(jnp.float32)
    d, m = floats[..., :1, :], floats[..., 1:, :] if kind.has_minimum else jnp.zeros_like(floats)
    if kind.num_inputs == GROUP:
        return d, -m if kind.has_minimum else m  # one level: the minimum is added
    factors = parts.factors[..., 0]
    if not kind.has_minimum:
        return d * jax.lax.bitcast_convert_type(factors, jnp.int8).astype(jnp.float32), m
    wide = factors.astype(jnp.float32)
    return d * wide[..., :8, :], m * wide[..., 8:, :]
