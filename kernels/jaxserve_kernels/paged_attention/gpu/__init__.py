"""Paged attention for Hopper GPUs in Pallas Mosaic GPU: `decode` for single queries, `prefill` for segments.

Only `attention` imports Pallas, and only programs for GPUs import that.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

DIMS = (64, 80, 96, 128, 256)
_FIRST_JAX = (0, 11, 2)
_MOST_GROUPED = 64


def unsupported(num_heads: int, pool_shape: tuple[int, ...], dtype: jnp.dtype, kv_dtype: jnp.dtype) -> str | None:
    """Return in a few words why these shapes and types have no kernel; None if they have one."""
    _, _, num_kv_heads, page_size, dim = pool_shape
    if jax.__version_info__ < _FIRST_JAX:
        return f"jax {jax.__version__} is older than {'.'.join(map(str, _FIRST_JAX))}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries of {jnp.dtype(dtype).name}: only bfloat16 and float16"
    if kv_dtype not in (dtype, jnp.float8_e4m3fn, jnp.int8):
        return f"a KV cache of {jnp.dtype(kv_dtype).name} with queries of {jnp.dtype(dtype).name}"
    if dim not in DIMS:
        return f"head dimension {dim}: only {', '.join(map(str, DIMS))}"
    if num_heads // num_kv_heads > _MOST_GROUPED:
        return f"{num_heads // num_kv_heads} query heads per KV head: at most {_MOST_GROUPED}"
    if page_size < 16 or page_size & (page_size - 1):
        return f"pages of {page_size} tokens: only powers of two from 16"
    return None
