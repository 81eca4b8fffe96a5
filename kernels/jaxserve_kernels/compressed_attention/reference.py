"""Vectors of blocks of tokens, and attention to a window and to blocks, in plain jax.numpy.

Every token gathers the vectors that it attends to: a window, and the blocks that are chosen for it or all of them. Loops go as far as the
tokens of a tile need, so one program serves every context.

Letters as in `api`; X tokens that a block's vector is made of, G blocks of a tile, Q queries of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from jaxserve_kernels.kv_write import numbers
from jaxserve_kernels.paged_attention import reference
from jaxserve_kernels.paged_attention.layout import Paging
from jaxserve_kernels.paged_attention.options import Scoring
from jaxserve_kernels.query_tiles import token_ends

_VECTORS_PER_LOOP = 512
"""Vectors of each query that are gathered at a time, at most."""


class Sizes(NamedTuple):
    """Sizes of what loops take. Static."""

    tokens: int
    """Queries whose vectors are gathered at a time."""
    mixed: int
    """Numbers and scores, of the tokens of as many blocks, that are gathered at a time."""
    is_fixed: bool
    """True: what one round of a loop may do is done without asking if it is needed."""


SMALL = Sizes(32, 1 << 21, is_fixed=False)
LARGE = Sizes(128, 1 << 24, is_fixed=True)
"""For GPUs, where the host starts every round of a loop, and waits for the condition of one whose rounds depend on data."""


class Closing(NamedTuple):
    """Tokens of a step that end a block, in their order."""

    tokens: Int[Array, "E"]
    """Indices on the axis of tokens; T after the last one."""
    rows: Int[Array, "E"]
    ends: Int[Array, "E"]
    """Tokens of the row up to the end of the block."""
    total: Int[Array, ""]


class Mixture(NamedTuple):
    """The place of numbers and scores in what a token adds to vectors of blocks. Static."""

    rate: int
    """Tokens of a block."""
    start: int
    """First of the numbers, which the scores follow."""
    dim: int  # H
    overlaps: bool
    """True: there are two of each for each number of a vector. The first counts in the block after the token's, the second in its own."""


class Compressed(NamedTuple):
    """The vectors of blocks, and those that queries attend to."""

    pages: Num[Array, "L P 1 U H"]
    layer: Int[Array, ""]
    paging: Paging
    chosen: Int[Array, "T C"] | None = None
    """Blocks that a query attends to if more than C end before it; None: to all."""


def compress(
    pages: Num[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    paging: Paging,
    closing: Closing,
    bias: Float[Array, "X D"],
    mixture: Mixture,
    sizes: Sizes = SMALL,
) -> Float[Array, "E H"]:
    """See `api.compress`."""
    page_size, (rate, start, dim, overlaps) = pages.shape[3], mixture
    num_tokens, width = (2 * rate, 2 * dim) if overlaps else (rate, dim)
    tile = min(len(closing.tokens), max(1, sizes.mixed // (2 * num_tokens * width)))
    rest = -len(closing.tokens) % tile
    rows, ends = (jnp.pad(x, (0, rest)) for x in (closing.rows, closing.ends))
    biases = jnp.tile(bias.astype(jnp.float32), (num_tokens // rate, 1))  # (X, D)

    def own_half(x: Float[Array, "G X D"]) -> Float[Array, "G X H"]:
        return jnp.concatenate([x[:, :rate, :dim], x[:, rate:, dim:]], 1) if overlaps else x

    def one_tile(index: Array, out: Array) -> Array:
        row, end = (jax.lax.dynamic_slice_in_dim(x, index * tile, tile) for x in (rows, ends))
        positions = end[:, None] - num_tokens + jnp.arange(num_tokens)  # (G, X)
        known = jnp.maximum(positions, 0)
        own = paging.block_tables[row[:, None], known // page_size]
        found = numbers(pages[layer, own, 0, known % page_size]).astype(jnp.float32)
        added, scores = (own_half(found[..., at : at + width]) for at in (start, start + width))
        scores = jnp.where(positions[..., None] < 0, reference.MASKED, scores + own_half(biases[None]))
        weights = jnp.exp(scores - scores.max(1, keepdims=True))
        # What stands before the text is any other text's, or not a number.
        added = jnp.where(positions[..., None] < 0, 0, added)
        made = (weights * added).sum(1) / weights.sum(1)
        return jax.lax.dynamic_update_slice_in_dim(out, made, index * tile, 0)

    out = jnp.zeros((len(rows), dim), jnp.float32)
    is_one = sizes.is_fixed and len(rows) == tile
    made: Array = jax.lax.fori_loop(0, 1 if is_one else -(-closing.total // tile), one_tile, out)
    is_own = jnp.arange(len(closing.tokens)) < closing.total
    return jnp.where(is_own[:, None], made[: len(closing.tokens)], 0)


def attend(
    q: Float[Array, "T N H"],
    pages: Num[Array, "L P 1 S H"],
    layer: Int[Array, ""],
    paging: Paging,
    compressed: Compressed | None,
    sinks: Float[Array, "N"] | None,
    *,
    window: int,
    rate: int,
    scoring: Scoring,
    sizes: Sizes = SMALL,
) -> Float[Array, "T N H"]:
    """See `api.write_and_attend`; the tokens' vectors are in their pages."""
    num_tokens, num_heads, dim = q.shape
    page_size, dtype = pages.shape[3], reference.matmul_dtype(q, pages)
    tile = min(num_tokens, sizes.tokens)
    rest = -num_tokens % tile
    rows, ends = token_ends(paging, paging.kv_lengths, num_tokens)
    chosen = None if compressed is None else compressed.chosen
    operands = [(q * scoring.scale).astype(dtype), rows, ends, *([] if chosen is None else [chosen])]
    operands = [jnp.pad(x, ((0, rest), *((0, 0),) * (x.ndim - 1))) for x in operands]
    in_window = min(window, _VECTORS_PER_LOOP)

    def one_tile(index: Array, out: Array) -> Array:
        queries, row, end, *choice = (jax.lax.dynamic_slice_in_dim(x, index * tile, tile, 0) for x in operands)

        def fold(
            state: reference.Softmax, vectors: Float[Array, "Q X H"], is_visible: Bool[Array, "Q X"]
        ) -> reference.Softmax:
            keys = jnp.where(is_visible[..., None], vectors, 0)[:, None]  # any other text's, or not a number
            return reference.attend(state, queries[:, None], keys, keys, is_visible[:, None, None], scoring.softcap)

        def near(part: Array, state: reference.Softmax) -> reference.Softmax:
            back = part * in_window + jnp.arange(in_window)
            positions = end[:, None] - 1 - back
            known = jnp.maximum(positions, 0)
            own = paging.block_tables[row[:, None], known // page_size]
            found = numbers(pages[layer, own, 0, known % page_size]).astype(dtype)
            return fold(state, found, (positions >= 0) & (back < window))

        state = reference.no_keys(tile, 1, num_heads, dim)
        is_one = sizes.is_fixed and window == in_window
        rounds = 1 if is_one else -(-jnp.minimum(end.max(), window) // in_window)
        state = jax.lax.fori_loop(0, rounds, near, state)
        if compressed is not None:
            blocks = choice[0] if choice else None
            state = _to_blocks(state, fold, compressed, blocks, row, end, rate, page_size, dtype, sizes)
        made = reference.finish(state, None if sinks is None else sinks[None])[:, 0].astype(q.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, made, index * tile, 0)

    out = jnp.zeros((num_tokens + rest, num_heads, dim), q.dtype)
    attended: Array = jax.lax.fori_loop(0, (num_tokens + rest) // tile, one_tile, out)
    return attended[:num_tokens]


def _to_blocks(
    state: reference.Softmax,
    fold: Callable[[reference.Softmax, Array, Array], reference.Softmax],
    compressed: Compressed,
    chosen: Int[Array, "Q C"] | None,
    rows: Int[Array, "Q"],
    ends: Int[Array, "Q"],
    rate: int,
    page_size: int,
    dtype: jnp.dtype,
    sizes: Sizes,
) -> reference.Softmax:
    """Fold the blocks of each query into its running softmax. ends: tokens up to the query."""
    pages, tables = compressed.pages, compressed.paging.block_tables
    counts = ends // rate
    size = min(_VECTORS_PER_LOOP, -(-tables.shape[1] * page_size // rate))
    if chosen is not None:
        is_all = (counts <= chosen.shape[1])[:, None]
        chosen = jnp.where(is_all, jnp.arange(chosen.shape[1]), chosen)
        counts = jnp.minimum(counts, chosen.shape[1])
        size = min(size, chosen.shape[1])
        chosen = jnp.pad(chosen, ((0, 0), (0, -chosen.shape[1] % size)))

    def body(part: Array, state: reference.Softmax) -> reference.Softmax:
        index = part * size + jnp.arange(size)
        is_visible = index < counts[:, None]
        blocks = jnp.broadcast_to(index, is_visible.shape)
        if chosen is not None:
            blocks = jax.lax.dynamic_slice_in_dim(chosen, part * size, size, 1)
        last = jnp.where(is_visible, (blocks + 1) * rate - 1, 0)
        own = tables[rows[:, None], last // page_size]
        found = numbers(pages[compressed.layer, own, 0, last % page_size // rate]).astype(dtype)
        return fold(state, found, is_visible)

    is_one = sizes.is_fixed and chosen is not None and chosen.shape[1] == size
    found: reference.Softmax = jax.lax.fori_loop(0, 1 if is_one else -(-counts.max() // size), body, state)
    return found
