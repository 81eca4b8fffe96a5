"""The functions of `api` by the kernel on `mma.sync` (see `mma`), for GPUs from compute capability 8.0 on.

Decode rows are tiles of one query each; chunks are cut into tiles of as many queries as columns hold their groups of
heads. Both go through the one kernel, in a launch of their own, and are joined by another.

They are jitted: a program that calls one for each of its layers traces and lowers it once.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.devices import multiprocessors
from jaxserve_kernels.paged_attention.gpu import MMA_KEYS, join_kernel, mma
from jaxserve_kernels.paged_attention.gpu.mma import QueryTiles
from jaxserve_kernels.paged_attention.gpu.splits import SLOT, make_cutting, make_segment_cutting, slot_bytes
from jaxserve_kernels.paged_attention.gpu.tiles import PageReader
from jaxserve_kernels.paged_attention.layout import Ragged, Tiling, ragged_layout
from jaxserve_kernels.paged_attention.options import Scoring
from jaxserve_kernels.paged_attention.tuning import DecodeTuning, decode_tuning

_DEVICE = "mma"
"""The table of block sizes."""
_SUBLANES = 8
"""Columns of one matmul."""
_CHUNK_COLUMNS = 32
"""Columns of a tile of a chunk: with 64, registers are spilled where the head dimension is 128."""


def default_tuning(q: Array, k_pages: Array) -> DecodeTuning:
    """Return the block sizes, for the device of this process."""
    tuned = decode_tuning(_DEVICE, q.shape[-1], k_pages.dtype.itemsize)
    blocks, otherwise = tuned.programs // _MULTIPROCESSORS, _MULTIPROCESSORS
    return replace(tuned, programs=blocks * multiprocessors(otherwise))


_MULTIPROCESSORS = 128
"""Multiprocessors that the table stands for, and that a process which only compiles takes."""


@functools.partial(jax.jit, static_argnames=("scoring", "tuning"))
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
    tuning: DecodeTuning | None = None,
) -> Float[Array, "B N H"]:
    """See `api.decode_attention`."""
    tuning = tuning or default_tuning(q, k_pages)
    num_rows, num_heads, dim = q.shape
    num_kv_heads, page_size = k_pages.shape[2:4]
    group = num_heads // num_kv_heads
    longest = block_tables.shape[1] * page_size
    cutting = make_cutting(tuning, num_rows, num_kv_heads, tuning.programs, longest)
    kernel = _kernel(q, k_pages, scoring, tuning, cutting.num_parts, _columns(group))
    grouped = q.reshape(num_rows, num_kv_heads, group, dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, kernel.columns - group), (0, 0)))
    queries = QueryTiles(grouped, jnp.arange(num_rows, dtype=jnp.int32), kv_lengths - 1, kv_lengths)
    parts = cutting.cut(*kernel.key_tiles(queries))
    values, stats = mma.attend(kernel, queries, k_pages, v_pages, layer, block_tables, parts)
    sinks = _of_columns(sinks, num_kv_heads, kernel.columns, 1)
    joined = join_kernel.join(parts, values, stats, sinks, q.dtype, typical_parts=cutting.parallel)
    return joined.reshape(num_rows, num_kv_heads, kernel.columns, dim)[:, :, :group].reshape(q.shape)


@functools.partial(jax.jit, static_argnames=("scoring", "tuning"))
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
    tuning: DecodeTuning | None = None,
) -> Float[Array, "T N H"]:
    """See `api.mixed_attention`. Segments are cut anew, since their tiles depend on the heads of a group."""
    tuning = tuning or default_tuning(q, k_pages)
    num_tokens, num_rows = q.shape[0], kv_lengths.shape[0]
    pool = (k_pages, v_pages, layer, block_tables)
    is_decode = jnp.arange(num_rows) < ragged.num_decode_rows
    singles = decode_attention(
        q[:num_rows], *pool, jnp.where(is_decode, kv_lengths, 0), scoring=scoring, sinks=sinks, tuning=tuning
    )
    segments = _chunks(q, *pool, kv_lengths, ragged, scoring=scoring, sinks=sinks, tuning=tuning).astype(q.dtype)
    token = jnp.arange(num_tokens)[:, None, None]
    singles = jnp.pad(singles, ((0, num_tokens - num_rows), (0, 0), (0, 0)))
    return jnp.where(token < ragged.num_decode_rows, singles, segments)


def _chunks(
    q: Float[Array, "T N H"],
    k_pages: Num[Array, "L P K S H"],
    v_pages: Num[Array, "L P K S H"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    kv_lengths: Int[Array, "B"],
    ragged: Ragged,
    *,
    scoring: Scoring,
    sinks: Float[Array, "N"] | None,
    tuning: DecodeTuning,
) -> Float[Array, "T N H"]:
    """Attend with the segments after the decode rows; zeros for tokens of none."""
    num_tokens, num_heads, dim = q.shape
    num_kv_heads = k_pages.shape[2]
    group = num_heads // num_kv_heads
    size = max(1, _CHUNK_COLUMNS // group)
    cut = ragged_layout(ragged.query_starts, ragged.num_decode_rows, num_tokens=num_tokens, tiling=Tiling(size))
    num_tiles, columns = cut.tile_rows.shape[0], _columns(size * group)
    most_slots = -(-num_tokens * group // SLOT) + num_tiles  # the last one of a tile may be filled in part
    cutting = make_segment_cutting(
        num_tiles,
        kv_lengths.shape[0],
        most_slots,
        slot_bytes(num_kv_heads, dim),
        max(1, tuning.long_split // MMA_KEYS),
    )
    kernel = _kernel(q, k_pages, scoring, tuning, cutting.num_parts, columns)
    kernel = replace(kernel, heads_per_query=group, num_slots=cutting.num_slots)

    queries = q[jnp.minimum(cut.tile_starts[:, None] + jnp.arange(size), num_tokens - 1)]  # (G, size, N, H)
    queries = queries.reshape(num_tiles, size, num_kv_heads, group, dim).transpose(0, 2, 1, 3, 4)
    queries = queries.reshape(num_tiles, num_kv_heads, size * group, dim)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, columns - size * group), (0, 0)))
    lengths, last_tokens = kv_lengths[cut.tile_rows], ragged.query_starts[cut.tile_rows + 1]
    positions = cut.tile_starts + lengths - last_tokens
    is_there = (jnp.arange(num_tiles) < cut.num_tiles) & (lengths > 0)
    ends = jnp.where(is_there, jnp.minimum(positions + size, lengths), 0)
    tiled = QueryTiles(queries, cut.tile_rows, positions, ends)
    tiles_of_segment = jnp.sum((cut.tile_rows[:, None] == cut.tile_rows) & is_there, axis=1)
    used = jnp.where(is_there, ends - positions, 0) * group
    parts, slots = cutting.cut(*kernel.key_tiles(tiled), tiles_of_segment, used)
    of_segments = used, slots.of_parts
    values, stats = mma.attend(kernel, tiled, k_pages, v_pages, layer, block_tables, parts, of_segments)
    sinks = _of_columns(sinks, num_kv_heads, columns, size)
    joined = join_kernel.join_slots(
        parts, slots, values, stats, sinks, q.dtype, cut.num_tiles, used, rows_of_tile=columns
    )

    # Each token's tile and column.
    token = jnp.arange(num_tokens)
    tile = jnp.sum((cut.tile_starts <= token[:, None]) & (jnp.arange(num_tiles) < cut.num_tiles), axis=1) - 1
    tile = jnp.maximum(tile, 0)
    offset = jnp.clip(token - cut.tile_starts[tile], 0, size - 1)
    column = offset[:, None] * group + jnp.arange(group)  # (T, G)
    is_seen = (token >= ragged.query_starts[ragged.num_decode_rows]) & (token < ragged.query_starts[-1])
    is_seen &= ends[tile] > 0
    joined = joined.reshape(num_tiles, num_kv_heads, columns, dim)[tile[:, None], :, column]  # (T, G, K, H)
    found = jnp.where(is_seen[:, None, None, None], joined, jnp.zeros_like(joined))
    return found.transpose(0, 2, 1, 3).reshape(num_tokens, num_heads, dim)


def _of_columns(
    sinks: Float[Array, "N"] | None, num_kv_heads: int, columns: int, size: int
) -> Float[Array, "KC"] | None:
    """Return the sink of each column of a tile of `size` queries; zeros for columns that hold none."""
    if sinks is None:
        return None
    repeated = jnp.tile(sinks.reshape(num_kv_heads, 1, -1), (1, size, 1)).reshape(num_kv_heads, -1)
    return jnp.pad(repeated, ((0, 0), (0, columns - repeated.shape[1]))).reshape(-1)


def _columns(queries: int) -> int:
    """Return the columns of matmuls for so many queries: a power of two, as tiles in shared memory are swizzled."""
    return max(_SUBLANES, 1 << (queries - 1).bit_length())


def _kernel(
    q: Array, k_pages: Array, scoring: Scoring, tuning: DecodeTuning, num_parts: int, columns: int
) -> mma.Kernel:
    """Return the parameters of a launch for single queries."""
    num_pages, num_kv_heads, page_size, dim = k_pages.shape[1:]
    return mma.Kernel(
        columns=columns,
        heads_per_query=columns,
        num_kv_heads=num_kv_heads,
        dim=dim,
        kv_dtype=k_pages.dtype,
        reader=PageReader(num_pages, num_kv_heads, page_size, MMA_KEYS),
        scoring=scoring,
        num_parts=num_parts,
        num_slots=0,
        programs=tuning.programs,
        stages=tuning.stages,
    )
