"""Decode attention in plain jax.numpy without loops: for GPUs that have no kernel here.

A loop whose length the device decides is part of no CUDA graph, and its keys are gathered into a copy. Here the pages
that rows may need come in buckets, powers of two: one branch each, a straight line that XLA fuses with the reading of
pages, so that keys and values are read from their pages and nothing as large is written. Sums are float32
(no tensor cores): a decode step waits for memory.

Letters: B rows, N query heads, K KV heads, G = N / K, H head dim, S slots per page, M pages per row, C pages of a block.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.paged_attention import reference
from jaxserve_kernels.paged_attention.options import Scoring

_SHORTEST = 512
"""Tokens of the smallest bucket."""
_BLOCK_BYTES = 256 << 20
"""Bytes of weighted values, a sum for each page, that one block of pages may take; the largest temporary array."""
_MOST_BLOCKS = 8
"""Blocks of the largest bucket. Longer contexts of as many rows take the loop of `reference`."""

mixed_attention = reference.mixed_attention
"""Segments of queries have no straight line: their number of tiles depends on the step."""


class _Rows(NamedTuple):
    """Operands of one call."""

    q: Float[Array, "B K G H"]
    k_pages: Num[Array, "L P K S H"]
    v_pages: Num[Array, "L P K S H"]
    layer: Int[Array, ""]
    block_tables: Int[Array, "B M"]
    lowest: Int[Array, "B"]
    """First key that each row sees."""
    lengths: Int[Array, "B"]


def decode_attention(
    q: Float[Array, "B N H"],
    k_pages: Num[Array, "L P K S H"],
    v_pages: Num[Array, "L P K S H"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    kv_lengths: Int[Array, "B"],
    *,
    scoring: Scoring,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B N H"]:
    """See `api.decode_attention`."""
    num_rows, num_heads, dim = q.shape
    num_kv_heads, page_size = k_pages.shape[2:4]
    most_pages = block_tables.shape[1]
    if scoring.sliding_window is not None:
        most_pages = min(most_pages, -(-scoring.sliding_window // page_size) + 1)
    block_pages = max(1, _BLOCK_BYTES // (4 * num_rows * num_heads * dim))
    if most_pages > _MOST_BLOCKS * block_pages:
        pool = (k_pages, v_pages, layer, block_tables, kv_lengths)
        return reference.decode_attention(q, *pool, scoring=scoring, sinks=sinks)
    window = scoring.sliding_window
    lowest = jnp.zeros_like(kv_lengths) if window is None else jnp.maximum(kv_lengths - window, 0)
    if window is not None and scoring.is_chunked:
        lowest = jnp.maximum(kv_lengths - 1, 0) // window * window
    grouped = q.reshape(num_rows, num_kv_heads, -1, dim).astype(jnp.float32) * scoring.scale
    rows = _Rows(grouped, k_pages, v_pages, layer, block_tables, lowest, kv_lengths)
    needed = jnp.max(-(-kv_lengths // page_size) - lowest // page_size)
    sizes = buckets(most_pages, page_size)
    branches = [functools.partial(_attend, scoring, sinks, size, block_pages) for size in sizes]
    bucket = sum((needed > size).astype(jnp.int32) for size in sizes[:-1])
    out: Array = jax.lax.switch(jnp.asarray(bucket, jnp.int32), branches, rows)
    return out.reshape(q.shape).astype(q.dtype)


def buckets(most_pages: int, page_size: int) -> list[int]:
    """Return the pages of each bucket: powers of two times the smallest, and the most that a row can need."""
    sizes = itertools.takewhile(
        lambda size: size < most_pages, (max(1, _SHORTEST // page_size) << i for i in itertools.count())
    )
    return [*sizes, most_pages]


def _attend(
    scoring: Scoring, sinks: Float[Array, "N"] | None, num_pages: int, block_pages: int, rows: _Rows
) -> Float[Array, "B K G H"]:
    """Attend to `num_pages` pages of each row, from the first that it sees on."""
    batch, heads, group, dim = rows.q.shape
    maximum = jnp.full((batch, heads, group), reference.MASKED, jnp.float32)
    total, values = jnp.zeros_like(maximum), jnp.zeros((batch, heads, group, dim), jnp.float32)
    for start in range(0, num_pages, block_pages):
        scores, tables = _scores(scoring, rows, start, min(block_pages, num_pages - start))
        highest = jnp.maximum(maximum, scores.max((1, 4)))
        weights = jnp.exp(scores - highest[:, None, :, :, None])
        decay = jnp.exp(maximum - highest)
        v = rows.v_pages[rows.layer, tables].astype(jnp.float32)  # (B, C, K, S, H)
        of_pages = (weights[..., None] * v[:, :, :, None]).sum(4)  # (B, C, K, G, H)
        # A sum over pages and slots at once would have XLA write all values anew, transposed.
        added = jax.lax.optimization_barrier(of_pages).sum(1)
        total, values = total * decay + weights.sum((1, 4)), values * decay[..., None] + added
        maximum = highest
    if sinks is not None:
        total = total + jnp.exp(sinks.reshape(heads, group) - maximum)
    values = values / jnp.maximum(total, 1e-30)[..., None]
    return jnp.where((rows.lengths > 0)[:, None, None, None], values, 0.0)


def _scores(
    scoring: Scoring, rows: _Rows, start: int, count: int
) -> tuple[Float[Array, "B C K G S"], Int[Array, "B C"]]:
    """Return the scores of a block of pages, and which pages these are."""
    page_size = rows.k_pages.shape[3]
    places = rows.lowest[:, None] // page_size + (start + jnp.arange(count))  # (B, C)
    tables = jnp.take_along_axis(rows.block_tables, jnp.minimum(places, rows.block_tables.shape[1] - 1), axis=1)
    k = rows.k_pages[rows.layer, tables].astype(jnp.float32)  # (B, C, K, S, H)
    scores = (rows.q[:, None, :, :, None] * k[:, :, :, None]).sum(-1)  # (B, C, K, G, S)
    if scoring.softcap is not None:
        scores = scoring.softcap * jnp.tanh(scores / scoring.softcap)
    positions = places[..., None] * page_size + jnp.arange(page_size)  # (B, C, S)
    visible = (positions < rows.lengths[:, None, None]) & (positions >= rows.lowest[:, None, None])
    return jnp.where(visible[:, :, None, None], scores, reference.MASKED), tables
