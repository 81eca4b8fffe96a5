"""Paged attention for TPUs in Pallas, with the writing of new keys and values: see `fused`.

Only programs for TPUs import Pallas.
"""

from __future__ import annotations

import jax.numpy as jnp

_SLOTS = 16
"""Rows of a packed tile of two-byte numbers."""


def unsupported(pool_shape: tuple[int, ...], dtype: jnp.dtype, kv_dtype: jnp.dtype) -> str | None:
    """Return in a few words why these shapes and types have no kernel; None if they have one."""
    page_size = pool_shape[3]
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries of {jnp.dtype(dtype).name}: only float32 and bfloat16"
    if kv_dtype not in (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8):
        return f"a KV cache of {jnp.dtype(kv_dtype).name}"
    if page_size % _SLOTS:
        return f"pages of {page_size} tokens: only multiples of {_SLOTS}"
    return None
