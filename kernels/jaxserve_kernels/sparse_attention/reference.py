"""Choice of tokens, and attention to the chosen ones, in plain jax.numpy.

The scores of a tile of queries are kept as integers of the same order. The C-th largest one is found bit by bit, by counts of
those that are at least as large: XLA would sort all of them, and on CPUs compare them one by one. A loop over blocks of keys
goes as far as the longest row needs, so one program serves every context, and short texts pay for what they have.

Letters as in `api`; G rows of a tile and Q queries of each of them, X keys of a block, K those of all blocks. If keys stand for pools
of tokens, X and K count pools.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num, UInt32

from jaxserve_kernels.kv_write import numbers
from jaxserve_kernels.paged_attention import reference
from jaxserve_kernels.paged_attention.layout import Paging
from jaxserve_kernels.paged_attention.options import Scoring
from jaxserve_kernels.query_tiles import TileLoop, over_tiles, token_ends


class Blocks(NamedTuple):
    """Sizes of the blocks that loops take. Static."""

    pairs: int = 1 << 14
    """Queries and keys whose scores of all heads are in memory at a time."""
    scored: int = 1024
    """Keys that are scored at a time, at most."""
    counted: int = 2048
    """Scores of each query that are counted at a time, at most."""


LARGE_BLOCKS = Blocks(pairs=1 << 17, scored=1 << 15, counted=1 << 18)
"""For GPUs, where the host starts every pass of a loop. Small blocks are for short texts on devices that loop at no cost."""
_TOKENS_PER_TILE, _CHOSEN_PER_BLOCK = 32, 512
"""Vectors that are gathered at a time."""
_BITS = 32


def choose(
    queries: Float[Array, "T J I"],
    weights: Float[Array, "T J"],
    pages: Num[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    paging: Paging,
    num_chosen: int,
    blocks: Blocks = Blocks(),  # noqa: B008  (immutable)
    pool_bias: Float[Array, "Z I"] | None = None,
    rate: int = 1,
) -> Int[Array, "T C"]:
    """Return the positions that each token of a long row attends to. See `api.write_and_choose`. rate: see `api.choose_blocks`."""
    pool_size = 1 if pool_bias is None else len(pool_bias)
    count = min(num_chosen, paging.block_tables.shape[1] * pages.shape[3])
    num_keys = (count + 1 - pool_size) // pool_size
    lengths = jnp.where(paging.kv_lengths // rate > num_chosen, paging.kv_lengths, 0)

    def make(num_rows: int, num_queries: int) -> TileLoop:
        sizes = _sizes(blocks, num_rows * num_queries, pages.shape[3], paging.block_tables.shape[1], pool_size)
        tables = _padded_table(paging.block_tables, sizes)

        def body(
            own: tuple[Array, ...], tables: Int[Array, "G M"], ends: Int[Array, "G Q"], ranks: UInt32[Array, "G Q K"]
        ) -> tuple[Int[Array, "G Q C"], UInt32[Array, "G Q K"]]:
            queries, weights = own
            key_ends = ends // (pool_size * rate)
            chosen, ranks = _choose_tile(
                queries, weights, pages, layer, tables, key_ends, ranks, num_keys, sizes, pool_bias
            )
            return chosen if pool_bias is None else _tokens_of_pools(chosen, ends, pool_size, count), ranks

        return TileLoop(body, tables, jnp.zeros((num_rows, num_queries, sizes.num_keys(tables)), jnp.uint32))

    return over_tiles((queries, weights), paging, lengths, make, (count,))


def _tokens_of_pools(
    chosen: Int[Array, "G Q P"], ends: Int[Array, "G Q"], size: int, count: int
) -> Int[Array, "G Q C"]:
    """Return the positions of the tokens of the chosen pools, then those of the tokens after the last whole pool, then zeros."""
    num_whole = (ends // size)[..., None]
    num_chosen, places = jnp.minimum(num_whole, chosen.shape[-1]) * size, jnp.arange(count)
    pools = jnp.take(chosen, jnp.minimum(places // size, chosen.shape[-1] - 1), axis=-1)
    positions = jnp.where(places < num_chosen, pools * size + places % size, num_whole * size + places - num_chosen)
    return jnp.where(places < num_chosen + (ends % size)[..., None], positions, 0)


class _Sizes(NamedTuple):
    """Blocks of the keys of a tile."""

    scored: int
    """Pages whose keys are scored at a time."""
    counted: int
    """Pages of keys that are counted at a time: a multiple."""
    page_size: int
    pool_size: int

    def num_keys(self, tables: Int[Array, "B M"]) -> int:
        """Return the keys of a row's pages."""
        return self.keys_of(tables.shape[1])

    def keys_of(self, num_pages: int) -> int:
        """Return the keys of so many pages, which have whole pools."""
        return num_pages * self.page_size // self.pool_size


def _sizes(blocks: Blocks, num_queries: int, page_size: int, num_pages: int, pool_size: int) -> _Sizes:
    keys, unit = min(blocks.pairs // num_queries, blocks.scored), math.lcm(page_size, pool_size) // page_size
    scored = unit * min(max(1, keys // (unit * page_size)), -(-num_pages // unit))
    most = min(max(1, blocks.counted // (scored * page_size)), -(-num_pages // scored))
    return _Sizes(scored, scored * most, page_size, pool_size)


def _padded_table(block_tables: Int[Array, "B M"], sizes: _Sizes) -> Int[Array, "B M2"]:
    """Append null pages to the table, so that no slice of a block clamps."""
    return jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % sizes.counted)))


def _choose_tile(
    queries: Float[Array, "G Q J I"],
    weights: Float[Array, "G Q J"],
    pages: Num[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    tables: Int[Array, "G M"],
    ends: Int[Array, "G Q"],
    ranks: UInt32[Array, "G Q K"],
    count: int,
    sizes: _Sizes,
    pool_bias: Float[Array, "Z I"] | None,
) -> tuple[Int[Array, "G Q C"], UInt32[Array, "G Q K"]]:
    """Choose up to `count` of the keys before `ends` for each query. ranks: memory for the scores, which is returned."""
    dtype = reference.matmul_dtype(queries, pages)
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    queries, num_scored = queries.astype(dtype), sizes.keys_of(sizes.scored)
    most = ends.max()

    def score(block: Array, ranks: UInt32[Array, "G Q K"]) -> UInt32[Array, "G Q K"]:
        table = jax.lax.dynamic_slice_in_dim(tables, block * sizes.scored, sizes.scored, 1)
        keys = reference.gather(pages, layer, table, dtype)[:, 0]  # (G, X, I)
        if pool_bias is not None:
            keys = _pooled(keys, pool_bias)
        of_heads = jnp.einsum("gqji,gxi->gqjx", queries, keys, precision=precision, preferred_element_type=jnp.float32)
        scores = jnp.einsum("gqjx,gqj->gqx", jax.nn.relu(of_heads), weights, precision=jax.lax.Precision.HIGHEST)
        is_visible = block * num_scored + jnp.arange(num_scored) < ends[..., None]
        found = jnp.where(is_visible, _ordered(scores), jnp.uint32(0))
        return jax.lax.dynamic_update_slice_in_dim(ranks, found, block * num_scored, 2)

    def clear(block: Array, ranks: UInt32[Array, "G Q K"]) -> UInt32[Array, "G Q K"]:
        nothing = jnp.zeros((*ends.shape, num_scored), jnp.uint32)
        return jax.lax.dynamic_update_slice_in_dim(ranks, nothing, block * num_scored, 2)

    num_counted = sizes.keys_of(sizes.counted)
    num_blocks, end = -(-most // num_counted), -(-most // num_scored)
    ranks = jax.lax.fori_loop(0, end, score, ranks)
    # What an earlier tile has left in the rest of the last block is of another text.
    ranks = jax.lax.fori_loop(end, num_blocks * (sizes.counted // sizes.scored), clear, ranks)

    def num_where(compare: str, than: UInt32[Array, "G Q"]) -> Int[Array, "G Q"]:
        def add(block: Array, total: Int[Array, "G Q"]) -> Int[Array, "G Q"]:
            own = jax.lax.dynamic_slice_in_dim(ranks, block * num_counted, num_counted, 2)
            is_counted = own >= than[..., None] if compare == ">=" else own > than[..., None]
            return total + is_counted.sum(-1, dtype=jnp.int32)

        total: Array = jax.lax.fori_loop(0, num_blocks, add, jnp.zeros(than.shape, jnp.int32))
        return total

    def set_bit(index: Array, found: UInt32[Array, "G Q"]) -> UInt32[Array, "G Q"]:
        higher = found | (jnp.uint32(1) << (_BITS - 1 - index).astype(jnp.uint32))
        return jnp.where(num_where(">=", higher) >= count, higher, found)

    smallest = jax.lax.fori_loop(0, jnp.where(most > 0, _BITS, 0), set_bit, jnp.zeros(ends.shape, jnp.uint32))
    num_equal = count - num_where(">", smallest)  # that are chosen of those with the smallest score
    chosen = _positions(ranks, smallest, num_equal, num_blocks, num_counted, count)
    return chosen, ranks


def _pooled(stored: Float[Array, "G Y W"], bias: Float[Array, "Z I"]) -> Float[Array, "G X I"]:
    """Return the keys of pools of tokens: see `api.IndexQueries.pool_bias`. stored: keys and gates of Y tokens."""
    pools = stored.reshape(len(stored), -1, *bias.shape[:1], stored.shape[-1])  # (G, X, Z, W)
    keys, gates = jnp.split(pools, 2, -1)
    shares = jax.nn.softmax(gates.astype(jnp.float32) + bias, axis=2).astype(keys.dtype)
    return (shares * keys).sum(2)


def _positions(
    ranks: UInt32[Array, "G Q K"],
    smallest: UInt32[Array, "G Q"],
    num_equal: Int[Array, "G Q"],
    num_blocks: Int[Array, ""],
    num_counted: int,
    count: int,
) -> Int[Array, "G Q C"]:
    """Return the places of all scores above the smallest one, and of the first `num_equal` that equal it, in their order."""
    rows, queries = (jnp.arange(size) for size in smallest.shape)
    own = functools.partial(jnp.expand_dims, axis=-1)

    def gather(block: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        chosen, num_found, num_ties = state
        ranks_of_block = jax.lax.dynamic_slice_in_dim(ranks, block * num_counted, num_counted, 2)
        is_tie = (ranks_of_block == own(smallest)) & (ranks_of_block > 0)  # 0: not visible
        ties = own(num_ties) + jnp.cumsum(is_tie, -1, dtype=jnp.int32)
        is_chosen = (ranks_of_block > own(smallest)) | (is_tie & (ties <= own(num_equal)))
        places = own(num_found) + jnp.cumsum(is_chosen, -1, dtype=jnp.int32)
        beyond = count + jnp.arange(num_counted)  # dropped, each at a place of its own
        chosen = chosen.at[rows[:, None, None], queries[:, None], jnp.where(is_chosen, places - 1, beyond)].set(
            block * num_counted + jnp.arange(num_counted), mode="drop", unique_indices=True
        )
        return chosen, places[..., -1], ties[..., -1]

    none = jnp.zeros(smallest.shape, jnp.int32)
    start = jnp.zeros((*smallest.shape, count), jnp.int32), none, none
    chosen: Array = jax.lax.fori_loop(0, num_blocks, gather, start)[0]
    return chosen


def _ordered(scores: Float[Array, "*s"]) -> UInt32[Array, "*s"]:
    """Return integers above 0 that are ordered as the float32 numbers are; 0 and -0 are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)
    return jnp.maximum(jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31)), 1)


def num_attended(
    paging: Paging, num_tokens: int, num_chosen: int, pool_size: int = 1
) -> tuple[Int[Array, "T"], Int[Array, "T"]]:
    """Return the row of each token, and how many chosen tokens it attends to: 0 if its row is not long."""
    rows, ends = token_ends(paging, paging.kv_lengths, num_tokens)
    is_long = paging.kv_lengths[rows] > num_chosen
    most = num_chosen + 1 - pool_size + ends % pool_size
    return rows, jnp.where(is_long, jnp.minimum(ends, most), 0)


def attend(
    q: Float[Array, "T N W"],
    pages: Num[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    paging: Paging,
    chosen: Int[Array, "T C"],
    num_chosen: int,
    *,
    pool_size: int = 1,
    scoring: Scoring,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "T N W"]:
    """Attend with each token of a long row to the vectors that were chosen for it; zeros for tokens of other rows."""
    num_tokens, num_heads, width = q.shape
    page_size, dtype = pages.shape[3], reference.matmul_dtype(q, pages)
    tile, block = min(num_tokens, _TOKENS_PER_TILE), min(chosen.shape[1], _CHOSEN_PER_BLOCK)
    rows, counts = num_attended(paging, num_tokens, num_chosen, pool_size)
    rest = -num_tokens % tile
    operands = [
        jnp.pad(x, ((0, rest), *((0, 0),) * (x.ndim - 1)))
        for x in ((q * scoring.scale).astype(dtype), rows, counts, chosen)
    ]

    def one_tile(index: Array, out: Array) -> Array:
        queries, rows, counts, chosen = (jax.lax.dynamic_slice_in_dim(x, index * tile, tile, 0) for x in operands)
        chosen = jnp.pad(chosen, ((0, 0), (0, -chosen.shape[1] % block)))

        def body(start: Array, state: reference.Softmax) -> reference.Softmax:
            positions = jax.lax.dynamic_slice_in_dim(chosen, start * block, block, 1)
            own = paging.block_tables[rows[:, None], positions // page_size]
            vectors = numbers(pages[layer, own, 0, positions % page_size]).astype(dtype)[:, None]  # (tile, 1, X, W)
            is_visible = start * block + jnp.arange(block) < counts[:, None]
            return reference.attend(
                state, queries[:, None], vectors, vectors, is_visible[:, None, None], scoring.softcap
            )

        num_blocks = -(-counts.max() // block)
        state = jax.lax.fori_loop(0, num_blocks, body, reference.no_keys(tile, 1, num_heads, width))
        made = reference.finish(state, None if sinks is None else sinks[None])[:, 0].astype(q.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, made, index * tile, 0)

    out = jnp.zeros((num_tokens + rest, num_heads, width), q.dtype)
    attended: Array = jax.lax.fori_loop(0, (num_tokens + rest) // tile, one_tile, out)
    return attended[:num_tokens]
