"""Rows that are sorted by expert, cut into tiles: each is so many rows, of which some are those of one expert.

An expert's first tile begins at a multiple of `alignment`, before its first row or at it. Letters: R rows, E experts, Q
tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class Tiles(NamedTuple):
    """Tiles of rows; the first `num_tiles` are real."""

    num_tiles: Int[Array, "1"]
    experts: Int[Array, "Q"]
    starts: Int[Array, "Q"]
    """The first row of each tile: a multiple of the alignment."""
    begins: Int[Array, "Q"]
    """The first row in it that is its expert's."""
    ends: Int[Array, "Q"]


class Places(NamedTuple):
    """The place of each row in the results of the tiles: tile after tile, each with the same number of rows."""

    experts: Int[Array, "R"]
    rows: Int[Array, "R"]


def most_tiles(num_rows: int, num_experts: int, rows: int, alignment: int) -> int:
    """An expert with n rows has at most (n + alignment - 1) / rows tiles, rounded up."""
    return (num_rows + min(num_rows, num_experts) * (rows + alignment - 2)) // rows


def tiles_of(group_sizes: Int[Array, "E"], num_rows: int, rows: int, alignment: int) -> Tiles:
    """Cut each expert's rows into tiles, without a loop: one would keep the step out of a CUDA graph."""
    num_experts = len(group_sizes)
    of = _ranges(group_sizes, rows, alignment)
    index = jnp.arange(most_tiles(num_rows, num_experts, rows, alignment), dtype=jnp.int32)
    experts = jnp.minimum((of.tile_ends <= index[:, None]).sum(1), num_experts - 1)
    starts = of.firsts[experts] + (index - of.tile_starts[experts]) * rows
    begins, ends = jnp.maximum(starts, of.starts[experts]), jnp.minimum(starts + rows, of.ends[experts])
    return Tiles(*(each.astype(jnp.int32) for each in (of.tile_ends[-1:], experts, starts, begins, ends)))


def places_of(group_sizes: Int[Array, "E"], num_rows: int, rows: int, alignment: int) -> Places:
    """Return the place of each row; rows after all groups get some valid place."""
    of = _ranges(group_sizes, rows, alignment)
    index = jnp.arange(num_rows, dtype=jnp.int32)
    experts = jnp.minimum((of.ends <= index[:, None]).sum(1), len(group_sizes) - 1)
    return Places(experts, of.tile_starts[experts] * rows + index - of.firsts[experts])


class _Ranges(NamedTuple):
    """The rows [start, end) of each expert, the first row of its first tile, and its tiles [start, end)."""

    starts: Int[Array, "E"]
    ends: Int[Array, "E"]
    firsts: Int[Array, "E"]
    tile_starts: Int[Array, "E"]
    tile_ends: Int[Array, "E"]


def _ranges(group_sizes: Int[Array, "E"], rows: int, alignment: int) -> _Ranges:
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    firsts = starts // alignment * alignment
    counts = jnp.where(group_sizes > 0, -(-(ends - firsts) // rows), 0)
    tile_ends = jnp.cumsum(counts)
    return _Ranges(starts, ends, firsts, tile_ends - counts, tile_ends)
