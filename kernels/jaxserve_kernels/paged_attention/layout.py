"""Places of a step's tokens: their pages, their rows, and the tiles of ragged segments.

Computed once a step, shared by all layers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

QUERIES_PER_TILE = 64
"""Large enough for efficient matmuls on a CPU, small enough that a short chunk wastes little."""


_TPU_LANES = 128


def pool_heads(num_kv_heads: int, head_dim: int, platform: str, num_devices: int = 1) -> tuple[int, int]:
    """Return the heads of a pool, and their dimension.

    TPUs lay out memory in whole rows of 128 lanes. Small heads of a KV head's neighbours share a row, two of 64 numbers
    for example, if as many rows are left for every device; otherwise what is added to a head holds zeros.
    """
    if platform != "tpu":
        return num_kv_heads, head_dim
    packed = _TPU_LANES // head_dim if _TPU_LANES % head_dim == 0 else 1
    if num_kv_heads % (packed * num_devices) == 0:
        return num_kv_heads // packed, max(packed * head_dim, -(-head_dim // _TPU_LANES) * _TPU_LANES)
    return num_kv_heads, -(-head_dim // _TPU_LANES) * _TPU_LANES


def to_pool_heads(
    q: Float[Array, "T N H"], k: Num[Array, "T K H"], v: Num[Array, "T K H"], pool_shape: tuple[int, ...]
) -> tuple[Float[Array, "T N H2"], Num[Array, "T K2 H2"], Num[Array, "T K2 H2"]]:
    """Lay out heads as the pool `[L, P, K2, S, H2]` has them, see `pool_heads`.

    Of a row that several KV heads share, a query sees its own head's numbers only: it is zero elsewhere.
    """
    tokens, num_heads, dim = q.shape
    num_kv_heads, pool_kv_heads, pool_dim = k.shape[1], pool_shape[2], pool_shape[4]
    packed = num_kv_heads // pool_kv_heads
    if packed > 1:
        grouped = q.reshape(tokens, pool_kv_heads, packed, num_heads // num_kv_heads, 1, dim)
        own = jnp.eye(packed, dtype=bool)[:, None, :, None]  # (packed, 1, packed, 1)
        q = jnp.where(own, grouped, jnp.zeros_like(grouped)).reshape(tokens, num_heads, packed * dim)
        k, v = (x.reshape(tokens, pool_kv_heads, packed * dim) for x in (k, v))
    return _widened(q, pool_dim), _widened(k, pool_dim), _widened(v, pool_dim)


def from_pool_heads(
    out: Float[Array, "T N H2"], num_kv_heads: int, dim: int, pool_shape: tuple[int, ...]
) -> Float[Array, "T N H"]:
    """Return what each head attended to, out of the rows that it shares; see `to_pool_heads`."""
    tokens, num_heads, _ = out.shape
    pool_kv_heads = pool_shape[2]
    packed = num_kv_heads // pool_kv_heads
    if packed == 1:
        return out[..., :dim]
    shared = out[..., : packed * dim].reshape(tokens, pool_kv_heads, packed, num_heads // num_kv_heads, packed, dim)
    return jnp.stack([shared[:, :, i, :, i] for i in range(packed)], 2).reshape(tokens, num_heads, dim)


def _widened(x: Num[Array, "T N H"], dim: int) -> Num[Array, "T N H2"]:
    """Pad each head with zeros to the width of the pool's heads."""
    return x if x.shape[2] == dim else jnp.pad(x, ((0, 0), (0, 0), (0, dim - x.shape[2])))


class Tiling(NamedTuple):
    """Tiling of segments into tiles of queries. Static."""

    queries: int = QUERIES_PER_TILE
    alignment: int = 1
    """A row's first tile starts at a multiple of it: at or a little before the row's first token."""


class Ragged(NamedTuple):
    """Segments on the flat token axis, and their cut into tiles.

    A tile belongs to one row. Tiles follow the token order, so a tile that runs past the end of its
    row is overwritten there by the next row's first tile.
    """

    query_starts: Int[Array, "B1"]  # B + 1 borders
    num_decode_rows: Int[Array, ""]
    tile_rows: Int[Array, "G"]
    """Row of each tile."""
    tile_starts: Int[Array, "G"]
    """First token of each tile on the flat axis."""
    num_tiles: Int[Array, ""]


class Paging(NamedTuple):
    """Rows of a step and their pages; row b's queries are tokens `query_starts[b] : query_starts[b + 1]`."""

    block_tables: Int[Array, "B M"]
    kv_lengths: Int[Array, "B"]
    """Keys each row has once this step's are written; 0 for a row that computes nothing."""
    query_starts: Int[Array, "B1"]
    pages: Int[Array, "T"]
    """Page and slot that each token's key and value go to; padding goes to the null page."""
    slots: Int[Array, "T"]
    ragged: Ragged | None
    """None: one token per row, token i belongs to row i."""
    key_ends: Int[Array, "T"] | None = None
    """End of the keys that each token sees: after the token, or later, but not after its row's last key. In steps with
    `ragged`, whose rows of one token see their own key last. None: after the token (causal)."""


def without_long_rows(paging: Paging, num_keys: int, page_size: int) -> Paging:
    """Return the rows of up to `num_keys` keys, with the pages that these may have; longer ones compute nothing."""
    lengths = jnp.where(paging.kv_lengths > num_keys, 0, paging.kv_lengths)
    return paging._replace(kv_lengths=lengths, block_tables=paging.block_tables[:, : -(-num_keys // page_size)])


def rows_of_tokens(paging: Paging, key_ends: Int[Array, "T"]) -> Paging:
    """Return the step with a row for each token, which sees the keys before its `key_ends`."""
    index = jnp.arange(len(key_ends))
    rows = jnp.searchsorted(paging.query_starts[1:], index, side="right", method="compare_all")  # see `ragged_layout`
    rows = jnp.minimum(rows, len(paging.kv_lengths) - 1)
    num_tokens = paging.query_starts[-1]
    is_seen = (index < num_tokens) & (paging.kv_lengths[rows] > 0)
    return paging._replace(
        block_tables=paging.block_tables[rows],
        kv_lengths=jnp.where(is_seen, key_ends, 0),
        query_starts=jnp.minimum(jnp.arange(len(key_ends) + 1, dtype=jnp.int32), num_tokens),
        ragged=None,
        key_ends=None,
    )


def ragged_layout(
    query_starts: Int[Array, "B1"],
    num_decode_rows: Int[Array, ""],
    *,
    num_tokens: int,
    tiling: Tiling | None = None,
    is_cut: Bool[Array, "B"] | None = None,
) -> Ragged:
    """Cut every row after the decode rows into tiles; the decode rows need none.

    is_cut: False for rows that get no tiles, because another device computes them.
    """
    tile, alignment = tiling or Tiling()
    num_rows = query_starts.shape[0] - 1
    max_tiles = -(-(num_tokens + (alignment - 1) * num_rows) // tile) + num_rows
    first_tokens = query_starts[:-1] // alignment * alignment  # (B,)
    is_tiled = (query_starts[1:] > query_starts[:-1]) & (jnp.arange(num_rows) >= num_decode_rows)
    if is_cut is not None:
        is_tiled &= is_cut
    tiles = jnp.where(is_tiled, -(-(query_starts[1:] - first_tokens) // tile), 0)  # (B,)
    ends = jnp.cumsum(tiles)  # (B,)
    index = jnp.arange(max_tiles)
    # All against all: a binary search is a loop, and a loop is part of no CUDA graph.
    rows = jnp.searchsorted(ends, index, side="right", method="compare_all")
    rows = jnp.minimum(rows, num_rows - 1).astype(jnp.int32)
    starts = first_tokens[rows] + (index - (ends[rows] - tiles[rows])) * tile
    return Ragged(query_starts, num_decode_rows, rows, starts.astype(jnp.int32), ends[-1].astype(jnp.int32))
