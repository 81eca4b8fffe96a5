"""Paged attention in plain jax.numpy: the specification of the op, and its CPU implementation.

Online softmax (Milakov & Gimelshein, arXiv 1805.02867; Rabe & Staats, arXiv 2112.05682) over blocks of
pages. The number of blocks is decided at run time by the longest row, so one program serves every
context length and a short batch never pays for a long one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.kv_write import numbers
from jaxserve_kernels.paged_attention.layout import QUERIES_PER_TILE, Ragged
from jaxserve_kernels.paged_attention.options import Scoring

KEYS_PER_TILE_BLOCK = 128
KEYS_PER_DECODE_BLOCK = 2048
"""Over all rows of a decode batch: few rows take large blocks, so that one pass does for a short context."""
MASKED = -1e30
"""Score of a key that must not be seen: finite, so that a row without keys stays free of NaN."""


class Softmax(NamedTuple):
    """Running maximum, sum of exponentials and weighted values of the keys seen so far."""

    maximum: Float[Array, "B K Q"]
    total: Float[Array, "B K Q"]
    values: Float[Array, "B K Q H"]


def no_keys(batch: int, heads: int, queries: int, dim: int) -> Softmax:
    """Return the running softmax before any key."""
    shape = (batch, heads, queries)
    return Softmax(
        jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, dim), jnp.float32)
    )


def _pages_per_block(keys: int, page_size: int, max_pages: int) -> int:
    return min(max(1, keys // page_size), max_pages)


def gather(
    pages: Num[Array, "L P K S H"], layer: Int[Array, ""], table: Int[Array, "B C"], dtype: jnp.dtype
) -> Float[Array, "B K C*S H"]:
    """Return the keys (or values) of C pages a row, head-major."""
    rows, count = table.shape
    _, _, heads, slots, dim = pages.shape
    read = numbers(pages[layer, table])
    return read.transpose(0, 2, 1, 3, 4).reshape(rows, heads, count * slots, dim).astype(dtype)


def matmul_dtype(q: Array, pages: Array) -> jnp.dtype:
    """Return the type of matmuls: 8-bit pools are multiplied in the queries' type."""
    return q.dtype if pages.dtype.itemsize == 1 else pages.dtype


def attend(
    state: Softmax,
    q: Float[Array, "B K Q H"],
    k: Float[Array, "B K X H"],
    v: Float[Array, "B K X H"],
    visible: Array,
    softcap: float | None,
) -> Softmax:
    """Fold X more keys into the running softmax; `visible` broadcasts to [B, K, Q, X]."""
    # Float32 is multiplied as float32 on every device, as in `layers/linear.py`.
    precision = jax.lax.Precision.HIGHEST if k.dtype == jnp.float32 else None
    matmul = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    scores = matmul("bkqh,bkxh->bkqx", q, k)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(visible, scores, MASKED)
    maximum = jnp.maximum(state.maximum, scores.max(-1))
    weights = jnp.where(visible, jnp.exp(scores - maximum[..., None]), 0.0)
    decay = jnp.exp(state.maximum - maximum)
    added = matmul("bkqx,bkxh->bkqh", weights.astype(v.dtype), v)
    return Softmax(maximum, state.total * decay + weights.sum(-1), state.values * decay[..., None] + added)


def finish(state: Softmax, sinks: Float[Array, "K Q"] | None) -> Float[Array, "B K Q H"]:
    """Return the weighted values. sinks: a logit per query that takes its share and gives nothing (gpt-oss)."""
    total = state.total
    if sinks is not None:
        total = total + jnp.exp(sinks - state.maximum)
    return state.values / jnp.maximum(total, 1e-30)[..., None]


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
    rows, num_heads, dim = q.shape
    _, _, num_kv_heads, page_size, _ = k_pages.shape
    group = num_heads // num_kv_heads
    wanted_keys = min(max(KEYS_PER_DECODE_BLOCK // rows, 64), 256)
    block_pages = _pages_per_block(wanted_keys, page_size, block_tables.shape[1])
    block_keys = block_pages * page_size
    dtype = matmul_dtype(q, k_pages)
    grouped = (q * scoring.scale).astype(dtype).reshape(rows, num_kv_heads, group, dim)

    window = scoring.sliding_window
    if window is not None and scoring.is_chunked:
        lowest = (kv_lengths - 1) // window * window
    else:
        lowest = jnp.zeros_like(kv_lengths) if window is None else jnp.maximum(kv_lengths - window, 0)
    table = _pad_to_multiple(block_tables, block_pages)

    def body(block: Array, state: Softmax) -> Softmax:
        pages = jax.lax.dynamic_slice_in_dim(table, block * block_pages, block_pages, 1)
        positions = block * block_keys + jnp.arange(block_keys)
        visible = (positions < kv_lengths[:, None]) & (positions >= lowest[:, None])  # (B, X)
        k, v = (gather(pool, layer, pages, dtype) for pool in (k_pages, v_pages))
        return attend(state, grouped, k, v, visible[:, None, None, :], scoring.softcap)

    # A padding row must not drag the window's start to zero for all.
    first = jnp.min(jnp.where(kv_lengths > 0, lowest, 2**31 - 1)) // block_keys
    last = (jnp.max(kv_lengths) + block_keys - 1) // block_keys
    state = jax.lax.fori_loop(first, last, body, no_keys(rows, num_kv_heads, group, dim))
    # A row without keys has no values either, whatever its sinks say.
    return finish(state, None if sinks is None else sinks.reshape(num_kv_heads, group)).reshape(q.shape).astype(q.dtype)


def mixed_attention(
    q: Float[Array, "T N H"],
    k_pages: Num[Array, "L P K S H"],
    v_pages: Num[Array, "L P K S H"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    kv_lengths: Int[Array, "B"],
    ragged: Ragged,
    *,
    scoring: Scoring,
    sinks: Float[Array, "N"] | None = None,
    key_ends: Int[Array, "T"] | None = None,
    decode: Callable[..., Array] = decode_attention,
) -> Float[Array, "T N H"]:
    """See `api.mixed_attention`. Decode rows go through `decode`, the others tile by tile."""
    num_tokens, num_heads, dim = q.shape
    num_rows = kv_lengths.shape[0]
    num_kv_heads, page_size = k_pages.shape[2:4]
    group, tile = num_heads // num_kv_heads, QUERIES_PER_TILE
    block_pages = _pages_per_block(KEYS_PER_TILE_BLOCK, page_size, block_tables.shape[1])
    block_keys = block_pages * page_size

    is_decode = jnp.arange(num_rows) < ragged.num_decode_rows
    decoded = decode(
        q[:num_rows],
        k_pages,
        v_pages,
        layer,
        block_tables,
        jnp.where(is_decode, kv_lengths, 0),
        scoring=scoring,
        sinks=sinks,
    )
    dtype, sliding_window = matmul_dtype(q, k_pages), scoring.sliding_window
    table = _pad_to_multiple(block_tables, block_pages)
    padded = jnp.pad((q * scoring.scale).astype(dtype), ((0, tile), (0, 0), (0, 0)))  # a tile may start at T - 1
    out = jnp.pad(decoded, ((0, num_tokens + tile - num_rows), (0, 0), (0, 0)))
    ends = None if key_ends is None else jnp.pad(key_ends, (0, tile))

    def one_tile(index: Array, out: Array) -> Array:
        row, start = ragged.tile_rows[index], ragged.tile_starts[index]
        queries = jax.lax.dynamic_slice_in_dim(padded, start, tile, 0)  # (tile, N, H)
        queries = queries.reshape(tile, num_kv_heads, group, dim).transpose(1, 0, 2, 3)
        queries = queries.reshape(1, num_kv_heads, tile * group, dim)
        offset = kv_lengths[row] - ragged.query_starts[row + 1]  # token index + offset = position
        query_positions = start + offset + jnp.arange(tile)
        last_positions = query_positions  # of keys
        if ends is not None:
            last_positions = jax.lax.dynamic_slice_in_dim(ends, start, tile, 0) - 1
        pages_of_row = table[row]

        def body(block: Array, state: Softmax) -> Softmax:
            pages = jax.lax.dynamic_slice_in_dim(pages_of_row, block * block_pages, block_pages, 0)[None]
            positions = block * block_keys + jnp.arange(block_keys)
            visible = positions <= last_positions[:, None]  # (tile, X)
            if sliding_window is not None and scoring.is_chunked:
                visible &= positions >= query_positions[:, None] // sliding_window * sliding_window
            elif sliding_window is not None:
                visible &= positions > query_positions[:, None] - sliding_window
            k, v = (gather(pool, layer, pages, dtype) for pool in (k_pages, v_pages))
            return attend(state, queries, k, v, jnp.repeat(visible, group, axis=0)[None, None], scoring.softcap)

        lowest = 0 if sliding_window is None else jnp.maximum(query_positions[0] - sliding_window + 1, 0)
        last = last_positions[-1] if ends is None else last_positions.max()
        end = jnp.minimum(last + 1, kv_lengths[row])
        state = jax.lax.fori_loop(
            lowest // block_keys,
            (end + block_keys - 1) // block_keys,
            body,
            no_keys(1, num_kv_heads, tile * group, dim),
        )
        sunk = None if sinks is None else jnp.tile(sinks.reshape(num_kv_heads, group), (1, tile))  # (K, tile * group)
        result = finish(state, sunk).reshape(num_kv_heads, tile, group, dim).transpose(1, 0, 2, 3)
        result = result.reshape(tile, num_heads, dim).astype(out.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, result, start, 0)

    attended: Array = jax.lax.fori_loop(0, ragged.num_tiles, one_tile, out)
    return attended[:num_tokens]


def _pad_to_multiple(table: Int[Array, "B M"], multiple: int) -> Int[Array, "B M2"]:
    """Append null pages to the table, so that a slice of `multiple` pages never clamps."""
    missing = -table.shape[1] % multiple
    return jnp.pad(table, ((0, 0), (0, missing)))
