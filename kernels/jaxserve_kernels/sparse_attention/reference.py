"""Choice of tokens, and attention to the chosen ones, in plain jax.numpy.

The scores of a tile of queries are kept as integers of the same order, of which `selection` takes the largest. A loop over blocks of keys
goes as far as the longest row needs, so one program serves every context, and short texts pay for what they have.

Letters as in `api`; G rows of a tile and Q queries of each of them, X keys of a block, K those of all blocks. If keys stand for pools
of tokens, X and K count pools.
"""

from __future__ import annotations

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
from jaxserve_kernels.sparse_attention import selection


class Blocks(NamedTuple):
    """Sizes of the blocks that loops take. Static."""

    pairs: int = 1 << 14
    """Queries and keys whose scores of all heads are in memory at a time."""
    scored: int = 1024
    """Keys that are scored at a time, at most."""
    counted: int = 2048
    """Scores of each query that are counted at a time, at most."""
    in_buckets: bool = False
    """True: see `selection.in_buckets`. Loops of attention have a fixed number of rounds then."""
    tokens: int = 32
    """Tokens whose vectors are gathered at a time."""


LARGE_BLOCKS = Blocks(pairs=1 << 17, scored=1 << 15, counted=1 << 18, in_buckets=True, tokens=64)
"""For GPUs, where the host starts every pass of a loop. Small blocks are for short texts on devices that loop at no cost."""
_CHOSEN_PER_BLOCK = 512
"""Vectors that are gathered at a time."""


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
                queries, weights, pages, layer, tables, key_ends, ranks, num_keys, sizes, pool_bias, blocks.in_buckets
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
    in_buckets: bool,
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
        found = jnp.where(is_visible, selection.ordered(scores), jnp.uint32(0))
        return jax.lax.dynamic_update_slice_in_dim(ranks, found, block * num_scored, 2)

    def clear(block: Array, ranks: UInt32[Array, "G Q K"]) -> UInt32[Array, "G Q K"]:
        nothing = jnp.zeros((*ends.shape, num_scored), jnp.uint32)
        return jax.lax.dynamic_update_slice_in_dim(ranks, nothing, block * num_scored, 2)

    num_counted = sizes.keys_of(sizes.counted)
    end = -(-most // num_scored)
    ranks = jax.lax.fori_loop(0, end, score, ranks)
    if in_buckets:
        return selection.in_buckets(ranks, ends, num_counted, count), ranks
    # What an earlier tile has left in the rest of the last block is of another text.
    num_blocks = -(-most // num_counted)
    ranks = jax.lax.fori_loop(end, num_blocks * (sizes.counted // sizes.scored), clear, ranks)
    return selection.in_loops(ranks, num_blocks, num_counted, count), ranks


def _pooled(stored: Float[Array, "G Y W"], bias: Float[Array, "Z I"]) -> Float[Array, "G X I"]:
    """Return the keys of pools of tokens: see `api.IndexQueries.pool_bias`. stored: keys and gates of Y tokens."""
    pools = stored.reshape(len(stored), -1, *bias.shape[:1], stored.shape[-1])  # (G, X, Z, W)
    keys, gates = jnp.split(pools, 2, -1)
    shares = jax.nn.softmax(gates.astype(jnp.float32) + bias, axis=2).astype(keys.dtype)
    return (shares * keys).sum(2)


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
    blocks: Blocks = Blocks(),  # noqa: B008  (immutable)
) -> Float[Array, "T N W"]:
    """Attend with each token of a long row to the vectors that were chosen for it; zeros for tokens of other rows."""
    num_tokens, num_heads, width = q.shape
    page_size, dtype = pages.shape[3], reference.matmul_dtype(q, pages)
    tile, block = min(num_tokens, blocks.tokens), min(chosen.shape[1], _CHOSEN_PER_BLOCK)
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

        num_blocks = chosen.shape[1] // block if blocks.in_buckets else -(-counts.max() // block)
        state = jax.lax.fori_loop(0, num_blocks, body, reference.no_keys(tile, 1, num_heads, width))
        made = reference.finish(state, None if sinks is None else sinks[None])[:, 0].astype(q.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, made, index * tile, 0)

    out = jnp.zeros((num_tokens + rest, num_heads, width), q.dtype)
    attended: Array = jax.lax.fori_loop(0, (num_tokens + rest) // tile, one_tile, out)
    return attended[:num_tokens]
