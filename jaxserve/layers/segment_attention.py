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

    def attend_from(start: Int[Array, ""]) -> Float[Array, "Q N H"]:
        first = jnp.clip(start - texts.longest, 0, num_tokens - window)
        queries, own = (jax.lax.dynamic_slice_in_dim(array, start, block) for array in (query, texts.rows))
        keys, values, others = (
            jax.lax.dynamic_slice_in_dim(array, first, window) for array in (key, value, texts.rows)
        )
        scores = jnp.einsum("qnh,knh->nqk", queries, keys, preferred_element_type=jnp.float32) * factor
        shares = jax.nn.softmax(jnp.where(own[:, None] == others, scores, -jnp.inf))
        return jnp.einsum("nqk,knh->qnh", shares.astype(value.dtype), values)

    num_blocks = -(-num_tokens // block)
    starts = jnp.minimum(jnp.arange(num_blocks) * block, num_tokens - block)  # the last one may overlap the one before
    blocks = jax.lax.map(attend_from, starts)  # (blocks, Q, N, H)
    *_, num_heads, _ = blocks.shape
    most = blocks[:-1].reshape(-1, num_heads, head_dim)
    return jnp.concatenate([most, blocks[-1, len(most) - num_tokens :]])
