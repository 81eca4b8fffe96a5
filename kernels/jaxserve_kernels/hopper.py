"""Tiles in shared memory, and small weights on their way to the tensor cores: for kernels of matmuls on Hopper."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp


def tiled(shape: tuple[int, ...], dtype: Any, columns: int | None = None) -> Any:
    """Shared memory in the tiles that tensor cores and bulk copies take, of this number of columns or as many as there may be."""
    bits = 4 if dtype == jnp.int4 else jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle((columns or shape[-1]) * bits)
    transforms = (plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def widened(tile: Any, dtype: Any) -> jax.Array:
    """8- and 4-bit weights in the type of the activations, which holds them exactly, as the tensor cores take them."""
    values = plgpu.layout_cast(tile[...], plgpu.Layout.WGMMA)
    if tile.dtype == jnp.float8_e4m3fn:
        values = values.astype(jnp.float16)  # the one conversion that Hopper has
        if dtype != jnp.float16:
            values = values.astype(jnp.float32)
    wide: jax.Array = values.astype(dtype)
    return wide


def stored(values: jax.Array, tile: Any) -> Any:
    """In shared memory: the interpreter's matmuls take no operand from registers."""
    tile[...] = values
    plgpu.commit_smem()
    return tile
