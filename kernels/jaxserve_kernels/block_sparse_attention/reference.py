"""Choice of blocks of tokens, and attention to the chosen ones, in plain jax.numpy.

The keys of a text are scored in a loop that goes as far as the longest row of a tile needs; only the best score of each block is
kept, so memory grows with tokens / block size. Attention gathers each token's blocks, in prompts as in decode steps, so its work
does not grow with the text.

Letters as in `api`; G rows of a tile and Q queries of each of them, X keys that are read at a time, Z blocks of a row's pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.kv_write import numbers
from jaxserve_kernels.paged_attention import reference
from jaxserve_kernels.paged_attention.layout import Paging
from jaxserve_kernels.paged_attention.options import Scoring
from jaxserve_kernels.query_tiles import TileLoop, over_tiles, token_ends
from jaxserve_kernels.rope import Rotation, rotate

_MOST_SCORED: Final = 1 << 15
"""Keys that are scored at a time at most."""


class Sizes(NamedTuple):
    """Sizes of what loops take. Static."""

    scored: int
    """Queries and keys whose scores are in memory at a time, for each head."""
    tokens: int
    """Tokens whose keys are gathered at a time, at most."""
    gathered: int
    """Tokens times keys of each that are gathered at a time, for each KV head."""
    is_fixed: bool
    """True: the number of rounds of a loop over chosen blocks is fixed. Otherwise tokens of rows that are not long take none."""


SMALL: Final = Sizes(1 << 14, 16, 1 << 13, is_fixed=False)
LARGE: Final = Sizes(1 << 17, 64, 1 << 15, is_fixed=True)
"""For GPUs, where the host starts every round of a loop, and waits for the condition of one whose rounds depend on data."""


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """The rule by which blocks are chosen for a query. Static."""

    size: int
    """Tokens of a block; block i has the tokens from `i * size` on."""
    count: int
    """Blocks that are chosen: those with the highest score of a key that the query sees. Of equal ones the earlier are taken."""
    num_local: int
    """The last blocks that a query sees, at most `count`, which are always chosen. The first of them holds the query. 0 with `BlockKeys`."""
    is_pooled: bool = False
    """True: blocks have keys (`BlockKeys`), whole blocks are chosen among those that end at the query or before, and the tokens after them
    come to those of the chosen ones."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the chosen blocks, and of those after them: a row with no more keys attends to all."""
        return self.size * self.count + (self.size - 1 if self.is_pooled else 0)


class BlockKeys(NamedTuple):
    """Numbers that turn the keys of tokens into those of blocks: a block's is their mean over its root mean square, times `weight`, then the first
    dimensions rotated as those of the block's first token."""

    weight: Float[Array, "I"]
    """Float32."""
    eps: Float[Array, ""]
    rotation: Rotation | None
    """Float32 (Z, R / 2), of the first token of each block that a row may have: the first R dimensions turn as halves. None: none do."""


def choose(
    queries: Float[Array, "T K I"],
    pages: Num[Array, "L P 1 S I"],
    layer: Int[Array, ""],
    paging: Paging,
    choice: BlockChoice,
    sizes: Sizes = SMALL,
) -> Int[Array, "T K C"]:
    """Return the blocks that each token of a long row attends to, ascending; what is after the last one lies after all keys."""
    page_size, num_pages = pages.shape[3], paging.block_tables.shape[1]
    lengths = jnp.where(paging.kv_lengths > choice.num_tokens, paging.kv_lengths, 0)
    count = min(choice.count, -(-num_pages * page_size // choice.size))

    def make(num_rows: int, num_queries: int) -> TileLoop:
        step, tables = _in_steps(paging, sizes.scored // (num_rows * num_queries), page_size, choice)

        def body(
            own: tuple[Array, ...], tables: Int[Array, "G M"], ends: Int[Array, "G Q"], state: tuple[()]
        ) -> tuple[Int[Array, "G Q K C"], tuple[()]]:
            best = _best_of_blocks(own[0], pages, layer, tables, ends, choice.size, step)
            return _chosen(best, ends, choice, count), state

        return TileLoop(body, tables)

    return over_tiles((queries,), paging, lengths, make, (queries.shape[1], count))


def choose_pooled(
    queries: Float[Array, "T J I"],
    keys: BlockKeys,
    pages: Num[Array, "L P 1 S I"],
    layer: Int[Array, ""],
    paging: Paging,
    choice: BlockChoice,
    sizes: Sizes = SMALL,
) -> Int[Array, "T 1 C"]:
    """Return the blocks that each token of a long row attends to, ascending, for all KV heads: the whole ones with the highest scores, and the
    one after the last whole one, which lies after all keys if no token has begun it. A block's score is the sum over heads of max(0, query . key)."""
    page_size, num_pages = pages.shape[3], paging.block_tables.shape[1]
    lengths = jnp.where(paging.kv_lengths > choice.num_tokens, paging.kv_lengths, 0)
    count = min(choice.count, num_pages * page_size // choice.size)

    def make(num_rows: int, num_queries: int) -> TileLoop:
        step, tables = _in_steps(paging, sizes.scored // (num_rows * num_queries), page_size, choice)

        def body(
            own: tuple[Array, ...], tables: Int[Array, "G M"], ends: Int[Array, "G Q"], state: tuple[()]
        ) -> tuple[Int[Array, "G Q 1 D"], tuple[()]]:
            scores = _scores_of_blocks(own[0], keys, pages, layer, tables, ends, choice.size, step)
            best, found = jax.lax.top_k(scores, count)
            found = jnp.where(best > -jnp.inf, found, scores.shape[-1])
            after = (ends // choice.size)[..., None]
            return jnp.sort(jnp.concatenate([found, after], -1), axis=-1)[:, :, None], state

        return TileLoop(body, tables)

    return over_tiles((queries,), paging, lengths, make, (1, count + 1))


def _scores_of_blocks(
    queries: Float[Array, "G Q J I"],
    keys: BlockKeys,
    pages: Num[Array, "L P 1 S I"],
    layer: Int[Array, ""],
    tables: Int[Array, "G M"],
    ends: Int[Array, "G Q"],
    size: int,
    step: int,
) -> Float[Array, "G Q Z"]:
    """Return the score of each block for every query; -inf for blocks of which it does not see all tokens."""
    queries, num_keys = queries.astype(jnp.float32), step * pages.shape[3]
    at_once, num_blocks = num_keys // size, tables.shape[1] * pages.shape[3] // size
    rotation = keys.rotation and Rotation(*(_of_length(each, num_blocks) for each in keys.rotation))

    def score(index: Array, scores: Float[Array, "G Q Z"]) -> Float[Array, "G Q Z"]:
        table = jax.lax.dynamic_slice_in_dim(tables, index * step, step, 1)
        own = reference.gather(pages, layer, table, queries.dtype)[:, 0]  # (G, X, I)
        # What stands after a text is in no block that a query sees, and may be anything.
        means = own.reshape(len(own), at_once, size, -1).mean(2)
        made = means * jax.lax.rsqrt(jnp.square(means).mean(-1, keepdims=True) + keys.eps) * keys.weight
        if rotation is not None:
            turns = Rotation(*(jax.lax.dynamic_slice_in_dim(each, index * at_once, at_once, 0) for each in rotation))
            turning, plain = jnp.split(made, [2 * turns.cos.shape[1]], -1)
            turned = rotate(jnp.moveaxis(turning, 0, 1), turns)  # blocks in the place of tokens, rows in that of heads
            made = jnp.concatenate([jnp.moveaxis(turned, 1, 0), plain], -1)
        found = jnp.einsum("gqji,gzi->gqjz", queries, made, precision=jax.lax.Precision.HIGHEST)
        found = jnp.maximum(found, 0).sum(2)
        is_whole = (index * at_once + jnp.arange(at_once) + 1) * size <= ends[..., None]
        return jax.lax.dynamic_update_slice_in_dim(scores, jnp.where(is_whole, found, -jnp.inf), index * at_once, 2)

    scores = jnp.full((*queries.shape[:2], num_blocks), -jnp.inf, jnp.float32)
    found: Array = jax.lax.fori_loop(0, -(-ends.max() // num_keys), score, scores)
    return found


def _of_length(x: Float[Array, "Z R"], count: int) -> Float[Array, "Y R"]:
    """Return the first `count` rows, with zeros after those that there are."""
    return jnp.pad(x, ((0, max(count - len(x), 0)), (0, 0)))[:count]


def _in_steps(paging: Paging, num_keys: int, page_size: int, choice: BlockChoice) -> tuple[int, Int[Array, "B M"]]:
    """Return the pages that are scored at once, and the tables with whole steps of them. num_keys: keys whose scores may be in memory."""
    num_pages = paging.block_tables.shape[1]
    step = _pages_per_step(min(num_keys, _MOST_SCORED), page_size, num_pages, choice)
    return step, jnp.pad(paging.block_tables, ((0, 0), (0, -num_pages % step)))


def _pages_per_step(num_keys: int, page_size: int, num_pages: int, choice: BlockChoice) -> int:
    """Return how many pages are scored at a time: whole blocks, about `num_keys` keys, and no more than there are."""
    unit = math.lcm(choice.size, page_size) // page_size
    return unit * min(max(1, num_keys // (unit * page_size)), -(-num_pages // unit))


def _best_of_blocks(
    queries: Float[Array, "G Q K I"],
    pages: Num[Array, "L P 1 S I"],
    layer: Int[Array, ""],
    tables: Int[Array, "G M"],
    ends: Int[Array, "G Q"],
    size: int,
    step: int,
) -> Float[Array, "G Q K Z"]:
    """Return the highest score of each block for every query and head; -inf where the query sees none of its keys."""
    dtype = reference.matmul_dtype(queries, pages)
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    queries, num_keys = queries.astype(dtype), step * pages.shape[3]

    def score(index: Array, best: Float[Array, "G Q K Z"]) -> Float[Array, "G Q K Z"]:
        table = jax.lax.dynamic_slice_in_dim(tables, index * step, step, 1)
        keys = reference.gather(pages, layer, table, dtype)[:, 0]  # (G, X, I)
        scores = jnp.einsum("gqki,gxi->gqkx", queries, keys, precision=precision, preferred_element_type=jnp.float32)
        is_visible = index * num_keys + jnp.arange(num_keys) < ends[..., None]
        scores = jnp.where(is_visible[:, :, None], scores, -jnp.inf)
        found = scores.reshape(*scores.shape[:-1], num_keys // size, size).max(-1)
        return jax.lax.dynamic_update_slice_in_dim(best, found, index * (num_keys // size), 3)

    num_blocks = tables.shape[1] * pages.shape[3] // size
    best = jnp.full((*queries.shape[:3], num_blocks), -jnp.inf, jnp.float32)
    found: Array = jax.lax.fori_loop(0, -(-ends.max() // num_keys), score, best)
    return found


def _chosen(
    best: Float[Array, "G Q K Z"], ends: Int[Array, "G Q"], choice: BlockChoice, count: int
) -> Int[Array, "G Q K C"]:
    num_blocks = best.shape[-1]
    blocks, after = jnp.arange(num_blocks), -(-ends // choice.size)[..., None]
    is_local = (blocks < after) & (blocks >= after - choice.num_local)
    scores, found = jax.lax.top_k(jnp.where(is_local[:, :, None], jnp.inf, best), count)
    return jnp.sort(jnp.where(scores > -jnp.inf, found, num_blocks), axis=-1)


def attend(
    q: Float[Array, "T N H"],
    k_pages: Num[Array, "L P K2 S H"],
    v_pages: Num[Array, "L P K2 S H"],
    layer: Int[Array, ""],
    paging: Paging,
    chosen: Int[Array, "T K C"],
    choice: BlockChoice,
    sizes: Sizes = SMALL,
    *,
    scoring: Scoring,
) -> Float[Array, "T N H"]:
    """Attend with each token of a long row to the blocks that were chosen for it; zeros for tokens of other rows.

    KV heads that share a row of the pool (`paged_attention.layout.pool_heads`) each read that row.
    """
    num_tokens, num_heads, dim = q.shape
    num_kv_heads, count = chosen.shape[1:]
    page_size, capacity = k_pages.shape[3], paging.block_tables.shape[1] * k_pages.shape[3]
    dtype = reference.matmul_dtype(q, k_pages)
    tile = min(num_tokens, sizes.tokens)
    at_once = min(count, max(1, sizes.gathered // tile // choice.size))
    rows, ends = token_ends(paging, paging.kv_lengths, num_tokens)
    ends = jnp.where(paging.kv_lengths[rows] > choice.num_tokens, ends, 0)
    rest = -num_tokens % tile
    q = (q * scoring.scale).astype(dtype).reshape(num_tokens, num_kv_heads, -1, dim)
    operands = [jnp.pad(x, ((0, rest), *((0, 0),) * (x.ndim - 1))) for x in (q, rows, ends, chosen)]
    pool_heads = jnp.arange(num_kv_heads)[:, None] * k_pages.shape[2] // num_kv_heads
    num_steps = -(-count // at_once)

    def one_tile(index: Array, out: Array) -> Array:
        queries, rows, ends, chosen = (jax.lax.dynamic_slice_in_dim(x, index * tile, tile, 0) for x in operands)
        missing = num_steps * at_once - count
        chosen = jnp.pad(chosen, ((0, 0), (0, 0), (0, missing)), constant_values=capacity)

        def body(step: Array, state: reference.Softmax) -> reference.Softmax:
            blocks = jax.lax.dynamic_slice_in_dim(chosen, step * at_once, at_once, 2)  # (tile, K, .)
            positions = (blocks[..., None] * choice.size + jnp.arange(choice.size)).reshape(tile, num_kv_heads, -1)
            is_visible = positions < ends[:, None, None]
            positions = jnp.minimum(positions, capacity - 1)
            own = paging.block_tables[rows[:, None, None], positions // page_size]
            places = layer, own, pool_heads, positions % page_size
            keys, values = (numbers(pages[places]).astype(dtype) for pages in (k_pages, v_pages))  # (tile, K, X, H)
            return reference.attend(state, queries, keys, values, is_visible[:, :, None], scoring.softcap)

        start = reference.no_keys(tile, num_kv_heads, num_heads // num_kv_heads, dim)
        rounds = num_steps if sizes.is_fixed else jnp.where(ends.max() > 0, num_steps, 0)
        state = jax.lax.fori_loop(0, rounds, body, start)
        made = reference.finish(state, None).reshape(tile, num_heads, dim).astype(out.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, made, index * tile, 0)

    out = jnp.zeros((num_tokens + rest, num_heads, dim), q.dtype)
    attended: Array = jax.lax.fori_loop(0, (num_tokens + rest) // tile, one_tile, out)
    return attended[:num_tokens]
