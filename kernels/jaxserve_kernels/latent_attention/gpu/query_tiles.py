"""Tiles of neighbouring tokens of a row: to the kernel each is what a row with one token and more heads is.

Plain JAX. Letters: B rows, T tokens, Q tiles of all rows, R tokens of a tile, N query heads, W width of a vector, V of its value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve_kernels.latent_attention.gpu import MOST_HEADS


class TileRows(NamedTuple):
    """The row of each tile, and its tokens: the first one, and how many there are."""

    rows: Int[Array, "Q"]
    starts: Int[Array, "Q"]
    counts: Int[Array, "Q"]
    """0 for a tile that does not exist."""
    ends: Int[Array, "Q"]
    """Keys that the last token sees; 0 for a tile that does not exist."""


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """The tiles of a step. Static: how many tokens each has room for."""

    size: int
    tiles: TileRows
    places: Int[Array, "T"]
    """Place of each token among those of all tiles; of padding a place whose result is finite."""

    def cut(self, q: Float[Array, "T N W"]) -> Float[Array, "Q RN W"]:
        """Return the queries of each tile. After its last token there are others."""
        tokens = self.tiles.starts[:, None] + jnp.arange(self.size)
        return q[jnp.minimum(tokens, len(q) - 1)].reshape(len(tokens), -1, q.shape[-1])

    def put_together(self, results: Float[Array, "Q RN V"], num_heads: int) -> Float[Array, "T N V"]:
        """Return the results of all tokens."""
        return results.reshape(-1, num_heads, results.shape[-1])[self.places]


def tile_size(num_tokens: int, num_rows: int, num_heads: int) -> int:
    """Return the tokens of a tile: as many as fill the rows of a matmul with their heads, if rows have so many tokens."""
    return max(1, min(MOST_HEADS // num_heads, -(-num_tokens // num_rows)))


def num_tiles(num_tokens: int, num_rows: int, size: int) -> int:
    """Return the most tiles of `size` tokens that rows have: one of each may be short."""
    return -(-num_tokens // size) + num_rows


def make_query_tiles(
    query_starts: Int[Array, "B1"], kv_lengths: Int[Array, "B"], num_tokens: int, num_heads: int
) -> QueryTiles:
    """Cut all rows, those with one token as well. A row of length 0 has tiles without tokens."""
    num_rows = len(kv_lengths)
    size = tile_size(num_tokens, num_rows, num_heads)
    first, last = query_starts[:-1], query_starts[1:]
    ends = jnp.cumsum(-(-(last - first) // size))  # (B,)
    before = ends + (first - last) // size  # tiles of the rows before

    def row_of(index: Int[Array, "X"], ends: Int[Array, "B"]) -> Int[Array, "X"]:
        # All against all: a binary search is a loop, and a loop is part of no CUDA graph.
        found = jnp.searchsorted(ends, index, side="right", method="compare_all")
        return jnp.minimum(found, num_rows - 1).astype(jnp.int32)

    index = jnp.arange(num_tiles(num_tokens, num_rows, size), dtype=jnp.int32)
    rows = row_of(index, ends)
    starts = first[rows] + (index - before[rows]) * size
    exists = (index < ends[-1]) & (kv_lengths[rows] > 0)
    counts = jnp.where(exists, jnp.minimum(last[rows] - starts, size), 0)
    seen = jnp.where(exists, kv_lengths[rows] - (last[rows] - (starts + counts)), 0)
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    own = row_of(tokens, last)
    places = before[own] * size + jnp.clip(tokens - first[own], 0, len(index) * size - 1)
    tiles = TileRows(*(each.astype(jnp.int32) for each in (rows, starts, counts, seen)))
    return QueryTiles(size, tiles, jnp.minimum(places, len(index) * size - 1))
