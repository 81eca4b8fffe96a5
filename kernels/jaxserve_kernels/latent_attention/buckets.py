"""Decode attention over latent vectors in plain jax.numpy without loops, for GPUs: the buckets of `paged_attention`, by matmuls.

All heads read the same vector, so a block of pages is copied and multiplied on the tensor cores; `bucketed` itself would
read each vector again for every head. The copy is written once and read twice.

Letters: B rows, N query heads, W width of a latent vector, V of its value, S slots per page, M pages per row.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.paged_attention import reference
from jaxserve_kernels.paged_attention.bucketed import buckets
from jaxserve_kernels.paged_attention.options import Scoring

_BLOCK_BYTES = 256 << 20
"""Bytes of the copied vectors of a block of pages."""
_MOST_BLOCKS = 8
"""Blocks of the largest bucket. Longer contexts of as many rows take the loop of `reference`."""


def decode_attention(
    q: Float[Array, "B N W"],
    pages: Num[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    kv_lengths: Int[Array, "B"],
    *,
    value_width: int,
    scoring: Scoring,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B N V"]:
    """See `api.decode_attention`."""
    (num_rows, most_pages), (page_size, width) = block_tables.shape, pages.shape[3:]
    block_pages = max(1, _BLOCK_BYTES // (num_rows * page_size * width * q.dtype.itemsize))
    if most_pages > _MOST_BLOCKS * block_pages:
        pool = (pages, pages, layer, block_tables, kv_lengths)
        return reference.decode_attention(q, *pool, scoring=scoring, sinks=sinks)[..., :value_width]
    needed = jnp.max(-(-kv_lengths // page_size))
    sizes = buckets(most_pages, page_size)
    bucket = sum((needed > size).astype(jnp.int32) for size in sizes[:-1])
    branches = [functools.partial(_attend, scoring, size, block_pages) for size in sizes]
    out: Array = jax.lax.switch(
        jnp.asarray(bucket, jnp.int32), branches, q, pages, layer, block_tables, kv_lengths, sinks
    )
    return out[..., :value_width]


def _attend(
    scoring: Scoring,
    num_pages: int,
    block_pages: int,
    q: Float[Array, "B N W"],
    pages: Num[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    kv_lengths: Int[Array, "B"],
    sinks: Float[Array, "N"] | None,
) -> Float[Array, "B N W"]:
    """Attend to the first `num_pages` pages of each row."""
    dtype = reference.matmul_dtype(q, pages)
    queries = (q * scoring.scale).astype(dtype)[:, None]  # (B, 1, N, W)
    num_rows, num_heads, width = q.shape
    state = reference.no_keys(num_rows, 1, num_heads, width)
    for start in range(0, num_pages, block_pages):
        table = block_tables[:, start : min(start + block_pages, num_pages)]
        vectors = reference.gather(pages, layer, table, dtype)  # (B, 1, X, W)
        positions = start * pages.shape[3] + jnp.arange(vectors.shape[2])
        visible = (positions < kv_lengths[:, None])[:, None, None]
        state = reference.attend(state, queries, vectors, vectors, visible, scoring.softcap)
    return reference.finish(state, None if sinks is None else sinks[None])[:, 0].astype(q.dtype)
