"""Places of a step's tokens: their pages, their rows, and the tiles of ragged segments.

Computed once a step, shared by all layers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

QUERIES_PER_TILE = 64
"""Large enough for efficient products on a CPU, small enough that a short chunk wastes little."""


_TPU_LANES = 128


def pool_head_dim(head_dim: int, platform: str) -> int:
    """Last dimension of a pool. TPUs lay it out in whole rows of lanes in any case; what is added holds zeros."""
    return -(-head_dim // _TPU_LANES) * _TPU_LANES if platform == "tpu" else head_dim


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


def ragged_layout(
    query_starts: Int[Array, "B1"], num_decode_rows: Int[Array, ""], *, num_tokens: int, tiling: Tiling | None = None
) -> Ragged:
    """Cut every row after the decode rows into tiles; the decode rows need none."""
    tile, alignment = tiling or Tiling()
    num_rows = query_starts.shape[0] - 1
    max_tiles = -(-(num_tokens + (alignment - 1) * num_rows) // tile) + num_rows
    first_tokens = query_starts[:-1] // alignment * alignment  # (B,)
    is_tiled = (query_starts[1:] > query_starts[:-1]) & (jnp.arange(num_rows) >= num_decode_rows)
    tiles = jnp.where(is_tiled, -(-(query_starts[1:] - first_tokens) // tile), 0)  # (B,)
    ends = jnp.cumsum(tiles)  # (B,)
    index = jnp.arange(max_tiles)
    # All against all: a binary search is a loop, and a loop is part of no CUDA graph.
    rows = jnp.searchsorted(ends, index, side="right", method="compare_all")
    rows = jnp.minimum(rows, num_rows - 1).astype(jnp.int32)
    starts = first_tokens[rows] + (index - (ends[rows] - tiles[rows])) * tile
    return Ragged(query_starts, num_decode_rows, rows, starts.astype(jnp.int32), ends[-1].astype(jnp.int32))
