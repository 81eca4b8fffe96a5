"""block_matmul in plain jax.numpy: the specification, and the implementation wherever there is no kernel.

XLA dequantises the matrix before the product: memory holds the blocks, and every step writes and reads the weights in
the activations' dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxserve_kernels.block_kinds import GROUP, TILE, BlockKind

_LARGEST = 127


def block_matmul(
    x: Float[Array, "T I"], tiles: UInt8[Array, "R B Y"], *, kind: BlockKind, dynamic: bool
) -> Float[Array, "T O"]:
    """See `api.block_matmul`."""
    rounded = round_inputs(x) if dynamic else x
    weight = dequantize_tiles(kind, tiles).astype(x.dtype)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("ti,oi->to", rounded, weight, precision=precision, preferred_element_type=jnp.float32)


def round_inputs(x: Float[Array, "T I"]) -> Float[Array, "T I"]:
    """Round every 32 inputs to 8 bits: the largest of them becomes 127 steps."""
    groups = x.astype(jnp.float32).reshape(len(x), -1, GROUP)
    scales = jnp.maximum(jnp.abs(groups).max(-1, keepdims=True), 1e-30) / _LARGEST
    return (jnp.round(groups / scales) * scales).reshape(x.shape).astype(x.dtype)


def dequantize_tiles(kind: BlockKind, tiles: UInt8[Array, "*E R B Y"]) -> Float[Array, "*E O I"]:
    """Return the weights in float32, every one as ggml dequantises it."""
    *experts, num_tiles, num_blocks, _ = tiles.shape
    shape = (*experts, num_tiles, num_blocks)
    d, m = _scales(kind, tiles, shape)  # (*E, R, B, scales of a block, 16)
    codes = _codes(kind, tiles, shape).astype(jnp.float32)  # (*E, R, B, 8 steps of each group, 16, 4)
    by_scale = codes.reshape(*shape, d.shape[-2], -1, TILE, 4)
    d, m = d[..., None, :, None], m[..., None, :, None]
    weights = d * by_scale - m if kind.has_minimum else d * (by_scale - kind.zero)
    weights = jnp.moveaxis(weights.reshape(*shape, -1, TILE, 4), -2, -4)  # (*E, R, 16, B, steps, 4)
    return weights.reshape(*experts, num_tiles * TILE, num_blocks * kind.num_inputs)


def _codes(kind: BlockKind, tiles: UInt8[Array, "*E R B Y"], shape: tuple[int, ...]) -> UInt8[Array, "*E R B S 16 4"]:
    """Return the unsigned codes; S: steps of 4 inputs."""
    own = tiles[..., : kind.num_groups * kind.code_bytes].reshape(*shape, kind.num_groups, -1, 1, TILE, 4)
    if kind.bits == 8:
        return own.reshape(*shape, -1, TILE, 4)
    nibbles, upper = own[..., :4, :, :, :], own[..., 4:, :, :, :]
    low = jnp.concatenate([nibbles & 15, nibbles >> 4], axis=-3).reshape(*shape, -1, TILE, 4)
    width = kind.bits - 4
    if width == 0:
        return low
    shifts = jnp.arange(0, 8, width, dtype=jnp.uint8)[:, None, None]
    high = (upper >> shifts & (1 << width) - 1).reshape(*shape, -1, TILE, 4)
    return low | high << 4


def _scales(
    kind: BlockKind, tiles: UInt8[Array, "*E R B Y"], shape: tuple[int, ...]
) -> tuple[Float[Array, "*E R B S 16"], Float[Array, "*E R B M 16"]]:
    """Return d and m in float32; m is zeros for types without it."""
    first = kind.num_groups * kind.code_bytes
    num_floats = TILE * (1 + kind.has_minimum)
    pairs = tiles[..., kind.tile_bytes - 2 * num_floats :].reshape(*shape, num_floats, 2)
    floats = jax.lax.bitcast_convert_type(pairs, jnp.float16).astype(jnp.float32).reshape(*shape, -1, TILE)
    d, m = floats[..., :1, :], floats[..., 1:, :] if kind.has_minimum else jnp.zeros_like(floats)
    if kind.num_inputs == GROUP:
        return d, -m if kind.has_minimum else m  # one level: the minimum is added
    factors = tiles[..., first : kind.tile_bytes - 2 * num_floats].reshape(*shape, -1, TILE)
    if not kind.has_minimum:
        return d * jax.lax.bitcast_convert_type(factors, jnp.int8).astype(jnp.float32), m
    wide = factors.astype(jnp.float32)
    return d * wide[..., :8, :], m * wide[..., 8:, :]
