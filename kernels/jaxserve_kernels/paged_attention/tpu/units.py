"""Cutting a step's queries into units of work for the TPU kernels: one row's share of one tile of queries.

Queries stand in tiles of a fixed number of tokens, so that every copy is aligned; a tile through which several rows
run is visited once for each, one after the other. Computed by XLA from the paging, the same for all layers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

Scalar = Int[Array, ""]


class Units(NamedTuple):
    """U units in the order of their tiles; `num_units` of them are real."""

    num_units: Int[Array, "1"]
    rows: Int[Array, "U"]
    tiles: Int[Array, "U"]
    first_tokens: Int[Array, "U"]
    """The row's tokens in the tile, `first_tokens : end_tokens`, counted from the tile's first."""
    end_tokens: Int[Array, "U"]
    positions: Int[Array, "U"]
    """Position that the tile's first token would have in the row; may be negative."""
    first_keys: Int[Array, "U"]
    """Keys that some query of the unit sees, `first_keys : end_keys`; never empty."""
    end_keys: Int[Array, "U"]


def decode_units(is_decode: Bool[Array, "B"], kv_lengths: Int[Array, "B"], window: int | None) -> Units:
    """A unit for each row that decodes; token b is row b's, and a tile of its own."""
    (rows,) = jnp.nonzero(is_decode & (kv_lengths > 0), size=is_decode.shape[0], fill_value=0)
    count = (is_decode & (kv_lengths > 0)).sum(dtype=jnp.int32)[None]
    ends = kv_lengths[rows]
    zeros = jnp.zeros_like(ends)
    return Units(count, *_int32(rows, rows, zeros, zeros + 1, ends - 1, _first_keys(ends - 1, window), ends))


def chunk_units(
    is_chunk: Bool[Array, "B"],
    kv_lengths: Int[Array, "B"],
    query_starts: Int[Array, "B1"],
    window: int | None,
    *,
    num_tokens: int,
    tokens_per_tile: int,
) -> Units:
    """A unit for each row and tile that meet, of the rows that compute a chunk: those have at least one token."""
    starts, ends = query_starts[:-1], query_starts[1:]
    first_tiles = starts // tokens_per_tile
    tiles_of_row = jnp.where(is_chunk, -(-ends // tokens_per_tile) - first_tiles, 0)  # (B,)
    count, rows, within = spread(tiles_of_row, -(-num_tokens // tokens_per_tile) + is_chunk.shape[0])
    tiles = first_tiles[rows] + within
    tile_starts = tiles * tokens_per_tile
    first_tokens = jnp.maximum(starts[rows], tile_starts)
    end_tokens = jnp.minimum(ends[rows], tile_starts + tokens_per_tile)
    offsets = kv_lengths[rows] - ends[rows]  # token + offset = position
    return Units(
        count,
        *_int32(
            rows,
            tiles,
            first_tokens - tile_starts,
            end_tokens - tile_starts,
            tile_starts + offsets,
            _first_keys(first_tokens + offsets, window),
            end_tokens + offsets,
        ),
    )


def spread(counts: Int[Array, "B"], most: int) -> tuple[Int[Array, "1"], Int[Array, "U"], Int[Array, "U"]]:
    """`counts[b]` items of each b in a row: how many in all, and of each item its b and its number within b."""
    ends = jnp.cumsum(counts)
    index = jnp.arange(most, dtype=jnp.int32)
    owners = jnp.searchsorted(ends, index, side="right", method="compare_all")
    owners = jnp.minimum(owners, counts.shape[0] - 1).astype(jnp.int32)
    return ends[-1:].astype(jnp.int32), owners, index - (ends - counts)[owners].astype(jnp.int32)


def _first_keys(positions: Int[Array, "U"], window: int | None) -> Int[Array, "U"]:
    return jnp.zeros_like(positions) if window is None else jnp.maximum(positions - window + 1, 0)


def _int32(*arrays: Array) -> list[Int[Array, "U"]]:
    return [array.astype(jnp.int32) for array in arrays]
