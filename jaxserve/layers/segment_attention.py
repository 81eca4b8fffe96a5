"""Bidirectional attention of every token to all tokens of its own text, on a flat axis of packed texts.

There is no cache: keys and values live for one layer. Memory is bounded by a block of queries and the keys that their
texts reach, so many short texts need no more than one of them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

QUERY_BLOCK: Final = 128
KEYS_AT_ONCE: Final = 4096
"""Most keys of a block of `attend_alike` with several texts: its scores shall stay in a GPU's L2 cache."""
SCORES_OF_CPUS: Final = 1 << 19
"""Most scores of a block of `attend_by_head`."""


class Texts(NamedTuple):
    """The text of each token of a flat axis. Texts follow each other; padding is one more text at the end."""

    rows: Int[Array, "T"]  # a different number for each text
    num_tokens: Int[Array, ""]  # without padding
    longest: int
    """Tokens of the longest text. Padding may have more: its results are not used."""


def attend(
    query: Float[Array, "T N H"],
    key: Float[Array, "T N H"],
    value: Float[Array, "T N H"],
    texts: Texts,
    scale: float | None = None,
) -> Float[Array, "T N H"]:
    """Return softmax(q k * scale) v within each text; scores and their sums are float32. scale: None: 1 / sqrt(H)."""
    num_tokens, _, head_dim = query.shape
    factor = head_dim**-0.5 if scale is None else scale
    # Padding may be NaN, and NaN * 0 is NaN.
    value = jnp.where((jnp.arange(num_tokens) < texts.num_tokens)[:, None, None], value, 0)
    block = min(QUERY_BLOCK, num_tokens)
    window = min(num_tokens, block + 2 * texts.longest)
    arrays = [array.swapaxes(0, 1) for array in (query, key, value)]  # (N, T, H): CPUs multiply whole heads

    def attend_from(start: Int[Array, ""]) -> Float[Array, "N Q H"]:
        first = jnp.clip(start - texts.longest, 0, num_tokens - window)
        own, others = (jax.lax.dynamic_slice_in_dim(texts.rows, *each) for each in ((start, block), (first, window)))
        places = (start, block), (first, window), (first, window)
        queries, keys, values = (
            jax.lax.dynamic_slice_in_dim(array, *place, axis=1) for array, place in zip(arrays, places, strict=True)
        )
        scores = jnp.einsum("nqh,nkh->nqk", queries, keys, preferred_element_type=jnp.float32) * factor
        shares = jax.nn.softmax(jnp.where(own[:, None] == others, scores, -jnp.inf))
        return jnp.einsum("nqk,nkh->nqh", shares.astype(values.dtype), values)

    num_blocks = -(-num_tokens // block)
    starts = jnp.minimum(jnp.arange(num_blocks) * block, num_tokens - block)  # the last one may overlap the one before
    blocks = jax.lax.map(attend_from, starts).swapaxes(1, 2)  # (blocks, Q, N, H)
    *_, num_heads, _ = blocks.shape
    most = blocks[:-1].reshape(-1, num_heads, head_dim)
    return jnp.concatenate([most, blocks[-1, len(most) - num_tokens :]])


def attend_alike(
    query: Float[Array, "T N H"],
    key: Float[Array, "T N H"],
    value: Float[Array, "T N H"],
    length: int,
    scale: float | None = None,
) -> Float[Array, "T N H"]:
    """Return softmax(q k * scale) v within texts that all have `length` tokens; T is a multiple of it.

    Unlike `attend`, which reads the keys of neighbours and masks them, it reads those of the own text only. Padding is whole texts.
    """
    *_, num_heads, head_dim = query.shape
    factor = head_dim**-0.5 if scale is None else scale
    block, num_texts = alike_block(len(query), length)
    shape = (-1, num_texts, length, num_heads, head_dim)
    arrays = tuple(array.reshape(shape).swapaxes(2, 3) for array in (query, key, value))  # (_, I, N, L, H)

    def attend_texts(arrays: tuple[Float[Array, "I N L H"], ...]) -> Float[Array, "I L N H"]:
        queries, keys, values = arrays

        def attend_from(start: Int[Array, ""]) -> Float[Array, "I N Q H"]:
            own = jax.lax.dynamic_slice_in_dim(queries, start, block, axis=2)
            scores = jnp.einsum("inqh,inkh->inqk", own, keys, preferred_element_type=jnp.float32) * factor
            return jnp.einsum("inqk,inkh->inqh", jax.nn.softmax(scores).astype(values.dtype), values)

        blocks = jax.lax.map(attend_from, jnp.arange(0, length, block))  # (blocks, I, N, Q, H)
        return jnp.reshape(blocks.transpose(1, 0, 3, 2, 4), (num_texts, length, num_heads, head_dim))

    return jnp.reshape(jax.lax.map(attend_texts, arrays), query.shape)


def attend_by_head(
    query: Float[Array, "T N H"],
    key: Float[Array, "T N H"],
    value: Float[Array, "T N H"],
    length: int,
    scale: float | None = None,
) -> Float[Array, "T N H"]:
    """Return what `attend_alike` returns, one head of one text after the other, for CPUs.

    Their matmuls are fastest with two axes, and 2 MB of scores stay in a core's cache. Shares are divided by their sum after the
    matmul with the values.
    """
    *_, num_heads, head_dim = query.shape
    factor = head_dim**-0.5 if scale is None else scale
    block = _divisor(length, max(1, SCORES_OF_CPUS // length))
    split = (-1, length, num_heads, head_dim)
    heads = tuple(jnp.reshape(a.reshape(split).swapaxes(1, 2), (-1, length, head_dim)) for a in (query, key, value))

    def attend_one(arrays: tuple[Float[Array, "L H"], ...]) -> Float[Array, "L H"]:
        queries, keys, values = arrays

        def attend_from(own: Float[Array, "Q H"]) -> Float[Array, "Q H"]:
            scores = jnp.einsum("qh,kh->qk", own, keys, preferred_element_type=jnp.float32) * factor
            shares = jnp.exp(scores - scores.max(-1, keepdims=True))
            summed = jnp.dot(shares.astype(values.dtype), values, preferred_element_type=jnp.float32)
            return (summed / shares.sum(-1, keepdims=True)).astype(values.dtype)

        return jnp.reshape(jax.lax.map(attend_from, queries.reshape(-1, block, head_dim)), queries.shape)

    found = jax.lax.map(attend_one, heads).reshape(-1, num_heads, length, head_dim)
    return jnp.reshape(found.swapaxes(1, 2), query.shape)


def alike_block(num_tokens: int, length: int) -> tuple[int, int]:
    """Return the queries of each text, and the number of texts, that `attend_alike` computes at a time."""
    count = num_tokens // length
    return _divisor(length, QUERY_BLOCK), _divisor(count, max(1, KEYS_AT_ONCE // length))


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` up to `most`."""
    return max(each for each in range(1, min(number, most) + 1) if number % each == 0)
