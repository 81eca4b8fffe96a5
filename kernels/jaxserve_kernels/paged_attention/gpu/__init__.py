"""Paged attention for GPUs in Pallas Mosaic GPU.

For Hopper `decode` for single queries and `prefill` for segments, on `wgmma` and bulk copies; `mma` for both on every GPU
from compute capability 8.0 on; `tcgen05` for segments on compute capability 10.x. Only `attention`, `mma_attention` and
`tcgen05_attention` import Pallas, and only programs for GPUs import these.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

DIMS = (64, 80, 96, 128, 256)
_FIRST_JAX = (0, 11, 2)
_MOST_GROUPED = 64
_MOST_GROUPED_MMA = 32
_TCGEN05_DIMS = (64, 128)
"""Tensor memory has no room for scores beside the sums of larger ones."""
MMA_KEYS = 64
"""Keys of a tile: the rows of a warpgroup's matmul."""
_MMA_STAGES = 2
"""Fewest tiles in flight."""


def unsupported(num_heads: int, pool_shape: tuple[int, ...], dtype: jnp.dtype, kv_dtype: jnp.dtype) -> str | None:
    """Return in a few words why these shapes and types have no kernel; None if they have one."""
    return _unsupported(num_heads, pool_shape, dtype, kv_dtype, _MOST_GROUPED)


def unsupported_mma(
    num_heads: int, pool_shape: tuple[int, ...], dtype: jnp.dtype, kv_dtype: jnp.dtype, shared_bytes: int | None
) -> str | None:
    """Return why the kernel on `mma.sync` does not serve these; None if it does. shared_bytes: most of one block."""
    reason = _unsupported(num_heads, pool_shape, dtype, kv_dtype, _MOST_GROUPED_MMA)
    dim, itemsize = pool_shape[4], jnp.dtype(kv_dtype).itemsize
    needed = 2 * _MMA_STAGES * MMA_KEYS * dim * itemsize  # keys and values
    if reason is None and shared_bytes is not None and needed >= shared_bytes:
        reason = f"head dimension {dim}: tiles of {needed >> 10} KB, a block has {shared_bytes >> 10}"
    return reason


def unsupported_tcgen05(
    num_heads: int, pool_shape: tuple[int, ...], dtype: jnp.dtype, kv_dtype: jnp.dtype, shared_bytes: int | None
) -> str | None:
    """Return why segments are not computed on `tcgen05.mma`, beside single queries on `mma.sync`; None if they are."""
    if pool_shape[4] not in _TCGEN05_DIMS:
        return f"head dimension {pool_shape[4]}: only {', '.join(map(str, _TCGEN05_DIMS))} on tcgen05"
    if kv_dtype != dtype:
        return f"a KV cache of {jnp.dtype(kv_dtype).name} with queries of {jnp.dtype(dtype).name} on tcgen05"
    return unsupported_mma(num_heads, pool_shape, dtype, kv_dtype, shared_bytes)


def _unsupported(
    num_heads: int,
    pool_shape: tuple[int, ...],
    dtype: jnp.dtype,
    kv_dtype: jnp.dtype,
    most_grouped: int,
) -> str | None:
    _, _, num_kv_heads, page_size, dim = pool_shape
    if jax.__version_info__ < _FIRST_JAX:
        return f"jax {jax.__version__} is older than {'.'.join(map(str, _FIRST_JAX))}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries of {jnp.dtype(dtype).name}: only bfloat16 and float16"
    if kv_dtype not in (dtype, jnp.float8_e4m3fn, jnp.int8):
        return f"a KV cache of {jnp.dtype(kv_dtype).name} with queries of {jnp.dtype(dtype).name}"
    if dim not in DIMS:
        return f"head dimension {dim}: only {', '.join(map(str, DIMS))}"
    if num_heads // num_kv_heads > most_grouped:
        return f"{num_heads // num_kv_heads} query heads per KV head: at most {most_grouped}"
    if page_size < 16 or page_size & (page_size - 1):
        return f"pages of {page_size} tokens: only powers of two from 16"
    return None
