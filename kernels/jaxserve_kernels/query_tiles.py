"""Loops over tiles of queries for ops that score the keys of whole texts: indexers of sparse attention.

Letters: B rows, T tokens, M pages per row at most; G rows of a tile and Q queries of each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxserve_kernels.paged_attention.layout import QUERIES_PER_TILE, Paging


class TileLoop(NamedTuple):
    """A loop over tiles of one shape (G, Q)."""

    body: Callable[[tuple[Array, ...], Int[Array, "G M"], Int[Array, "G Q"], Any], tuple[Array, Any]]
    """From the queries `[G, Q, ...]` of a tile, the page tables of its rows, the end of the keys that each query sees, 0 if it
    sees none, and the state: the results `[G, Q, ...]` and the state for the next tile."""
    tables: Int[Array, "B M"]
    """The page tables, padded as `body` needs them."""
    state: Any = ()
    """Memory that tiles hand on."""


def over_tiles(
    queries: tuple[Array, ...],
    paging: Paging,
    lengths: Int[Array, "B"],
    make: Callable[[int, int], TileLoop],
    num_results: tuple[int, ...],
) -> Int[Array, "T ..."]:
    """Return the integers that a loop makes of each token; those of tokens after the last row have no meaning.

    queries: arrays `[T, ...]`. lengths: keys of each row, 0 for rows without results. make: returns the loop for tiles of G and Q.
    num_results: shape of the results of a token. Rows of one token share tiles, and a longer row has tiles of its own.
    """
    num_tokens, num_rows, tile = len(queries[0]), len(lengths), QUERIES_PER_TILE
    ragged = paging.ragged
    first = lengths if ragged is None else jnp.where(jnp.arange(num_rows) < ragged.num_decode_rows, lengths, 0)
    found = _of_single_queries(tuple(x[:num_rows] for x in queries), first, make, num_results)
    if ragged is None:
        return found
    padded = [_padded(x, tile) for x in queries]  # a tile may start at T - 1
    out = _padded(found, num_tokens + tile - num_rows)
    loop = make(1, tile)

    def one_tile(index: Array, carried: tuple[Array, Any]) -> tuple[Array, Any]:
        out, state = carried
        row, start = ragged.tile_rows[index], ragged.tile_starts[index]
        own = tuple(jax.lax.dynamic_slice_in_dim(x, start, tile, 0)[None] for x in padded)
        ends = start + lengths[row] - ragged.query_starts[row + 1] + 1 + jnp.arange(tile)
        ends = jnp.where(lengths[row] > 0, jnp.minimum(ends, lengths[row]), 0)[None]
        results, state = loop.body(own, loop.tables[row][None], ends, state)
        return jax.lax.dynamic_update_slice_in_dim(out, results[0], start, 0), state

    made: Array = jax.lax.fori_loop(0, ragged.num_tiles, one_tile, (out, loop.state))[0]
    return made[:num_tokens]


def _of_single_queries(
    queries: tuple[Array, ...], lengths: Int[Array, "B"], make: Callable[[int, int], TileLoop], results: tuple[int, ...]
) -> Int[Array, "B ..."]:
    """Return the results of one query token of each row."""
    num_rows = len(lengths)
    tile = min(num_rows, QUERIES_PER_TILE)
    rest, loop = -num_rows % tile, make(tile, 1)
    *own_queries, tables, all_ends = (
        _padded(x, rest).reshape(-1, tile, *x.shape[1:]) for x in (*queries, loop.tables, lengths)
    )

    def one_tile(index: Array, carried: tuple[Array, Any]) -> tuple[Array, Any]:
        out, state = carried
        own = tuple(x[index][:, None] for x in own_queries)
        found, state = loop.body(own, tables[index], all_ends[index][:, None], state)
        return jax.lax.dynamic_update_slice_in_dim(out, found[:, 0], index * tile, 0), state

    out = jnp.zeros((num_rows + rest, *results), jnp.int32)
    made: Array = jax.lax.fori_loop(0, len(all_ends), one_tile, (out, loop.state))[0]
    return made[:num_rows]


def token_ends(paging: Paging, lengths: Int[Array, "B"], num_tokens: int) -> tuple[Int[Array, "T"], Int[Array, "T"]]:
    """Return the row of each token, and the end of the keys that it sees: 0 after the last row, and at most 0 in rows whose
    `lengths` are 0."""
    tokens, last_row = jnp.arange(num_tokens), len(lengths) - 1
    if paging.ragged is None:
        return tokens, lengths
    starts = paging.query_starts
    found = jnp.searchsorted(starts[1:], tokens, side="right", method="compare_all")
    rows = jnp.minimum(found, last_row)
    return rows, jnp.where(tokens < starts[-1], tokens + 1 + lengths[rows] - starts[rows + 1], 0)


def _padded(x: Array, count: int) -> Array:
    """Append `count` zeros to the first axis."""
    return jnp.pad(x, ((0, count), *((0, 0),) * (x.ndim - 1)))
