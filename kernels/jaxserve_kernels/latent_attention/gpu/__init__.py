"""Attention over latent vectors for Hopper, in Pallas Mosaic GPU. Only `attention` imports Pallas, and only programs for GPUs import it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MOST_HEADS = 64
"""Heads of a tile: rows of a warpgroup's matmul."""
SUBLANES = 8
"""Rows of a tile in shared memory: copies move whole tiles."""
_FIRST_JAX = (0, 11, 2)
_WIDTHS = {576: 512, 320: 256}
"""Widths of vectors that have a kernel, and of their values."""


def unsupported(pool_shape: tuple[int, ...], value_width: int, dtype: jnp.dtype, kv_dtype: jnp.dtype) -> str | None:
    """Return in a few words why a pool `[L, P, 1, S, W]` and these types have no kernel; None if they have one."""
    page_size, width = pool_shape[3:]
    if jax.__version_info__ < _FIRST_JAX:
        return f"jax {jax.__version__} is older than {'.'.join(map(str, _FIRST_JAX))}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries of {jnp.dtype(dtype).name}: only bfloat16 and float16"
    if kv_dtype not in (dtype, jnp.float8_e4m3fn):
        return f"latent vectors of {jnp.dtype(kv_dtype).name} with queries of {jnp.dtype(dtype).name}"
    if _WIDTHS.get(width) != value_width:
        known = ", ".join(f"{values} of {whole}" for whole, values in _WIDTHS.items())
        return f"latent vectors of {width} numbers, {value_width} of them values: only {known}"
    if page_size < 16 or page_size & (page_size - 1):
        return f"pages of {page_size} tokens: only powers of two from 16"
    return None


def head_tiles(num_heads: int) -> tuple[int, int]:
    """Return the number of tiles that heads fill, and the heads of a tile: a multiple of `SUBLANES`, with room for all heads."""
    num_tiles = -(-num_heads // MOST_HEADS)
    return num_tiles, -(-num_heads // (num_tiles * SUBLANES)) * SUBLANES
