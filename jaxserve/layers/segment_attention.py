"""Bidirectional attention of every token to all tokens of its own text, on a flat axis of packed texts.

There is no cache: keys and values live for one layer. Memory is bounded by a block of queries and the keys that their
texts reach, so many short texts need no more than one of them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.segment_attention import QUERY_BLOCK, attend_segments
from jaxtyping import Array, Float, Int

KEYS_AT_ONCE: Final = 4096
"""Most keys of a block of `attend_alike` with several texts: its scores shall stay in a GPU's L2 cache."""


class Texts(NamedTuple):
    """The text of each token of a flat axis. Texts follow each other; padding is one more text at the end."""

    rows: Int[Array, "T"]  # a different number for each text
    num_tokens: Int[Array, ""]  # without padding
    longest: int
    """Tokens of the longest text. Padding may have more: its results are not used."""


def attend(
    query: Float[Array, "Q N H"],
    key: Float[Array, "T K H"],
    value: Float[Array, "T K H"],
    texts: Texts,
    scale: float | None = None,
    *,
    first: Int[Array, ""] | None = None,
    window: int | None = None,
    bias: Float[Array, "N R"] | None = None,
    backend: Backend = "reference",
) -> Float[Array, "Q N H"]:
    """Return softmax(q k * scale) v within each text; scores and their sums are float32.

    scale: None: 1 / sqrt(H). first: the token of the first query, which the tokens of the others follow; None: 0. window: a token
    attends to those that are fewer tokens away; None: to all of its text. There may be fewer heads of keys and values than of
    queries, each for as many neighbouring heads. bias: added to scores by head and distance, see `attend_segments`.
    """
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = (jnp.repeat(array, group, axis=1) for array in (key, value))
    return attend_segments(
        query,
        key,
        value,
        texts.rows,
        texts.num_tokens,
        first,
        scale=factor,
        longest=texts.longest,
        window=window,
        bias=bias,
        backend=backend,
    )


def attend_alike(
    query: Float[Array, "Q N H"],
    key: Float[Array, "T N H"],
    value: Float[Array, "T N H"],
    length: int,
    scale: float | None = None,
) -> Float[Array, "Q N H"]:
    """Return softmax(q k * scale) v within texts that all have `length` tokens; T is a multiple of it.

    Unlike `attend`, which reads the keys of neighbours and masks them, it reads those of the own text only. Padding is whole texts.
    There may be fewer queries than keys: equally many of each text.
    """
    *_, num_heads, head_dim = query.shape
    factor = head_dim**-0.5 if scale is None else scale
    num_queries = len(query) * length // len(key)  # of a text
    block, num_texts = _query_block(num_queries), alike_block(len(key), length)[1]
    padding = -num_queries % block
    arrays = tuple(  # (_, I, N, L, H)
        array.reshape(-1, num_texts, count, num_heads, head_dim).swapaxes(2, 3)
        for array, count in ((query, num_queries), (key, length), (value, length))
    )

    def attend_texts(
        arrays: tuple[Float[Array, "I N O H"], Float[Array, "I N L H"], Float[Array, "I N L H"]],
    ) -> Float[Array, "I O N H"]:
        queries, keys, values = arrays

        def attend_from(start: Int[Array, ""]) -> Float[Array, "I N B H"]:
            own = jax.lax.dynamic_slice_in_dim(queries, start, block, axis=2)
            scores = jnp.einsum("inqh,inkh->inqk", own, keys, preferred_element_type=jnp.float32) * factor
            return jnp.einsum("inqk,inkh->inqh", jax.nn.softmax(scores).astype(values.dtype), values)

        if padding:
            queries = jnp.pad(queries, ((0, 0), (0, 0), (0, padding), (0, 0)))
        blocks = jax.lax.map(attend_from, jnp.arange(0, num_queries, block))  # (blocks, I, N, B, H)
        made = jnp.reshape(blocks.transpose(1, 0, 3, 2, 4), (num_texts, num_queries + padding, num_heads, head_dim))
        return made[:, :num_queries]

    return jnp.reshape(jax.lax.map(attend_texts, arrays), query.shape)


def alike_block(num_tokens: int, length: int) -> tuple[int, int]:
    """Return the queries of each text, and the number of texts, that `attend_alike` computes at a time."""
    count = num_tokens // length
    return _query_block(length), _divisor(count, max(1, KEYS_AT_ONCE // length))


def _query_block(num_queries: int) -> int:
    """Return the queries of a block: a divisor of them, or if all divisors are small, such as those of a prime, a number that leaves
    little padding."""
    even = _divisor(num_queries, QUERY_BLOCK)
    padded = -(-num_queries // -(-num_queries // QUERY_BLOCK))
    return even if 2 * even > padded else padded


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` up to `most`."""
    return max(each for each in range(1, min(number, most) + 1) if number % each == 0)
