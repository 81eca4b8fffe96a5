"""attend_segments in plain jax.numpy: the specification. Memory is bounded by a block of queries and the keys that they may reach."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

QUERY_BLOCK: Final = 128
"""Queries that are computed at a time."""


def attend_segments(
    query: Float[Array, "Q N H"],
    key: Float[Array, "T N H"],
    value: Float[Array, "T N H"],
    numbers: Int[Array, "T"],
    num_tokens: Int[Array, ""],
    first: Int[Array, ""],
    *,
    scale: float,
    longest: int,
    window: int | None = None,
    bias: Float[Array, "N R"] | None = None,
) -> Float[Array, "Q N H"]:
    """See `api.attend_segments`: a block reads the keys of neighbouring segments and masks them."""
    num_queries, num_heads, head_dim = query.shape
    count = len(key)
    # Padding may be NaN, and NaN * 0 is NaN.
    value = jnp.where((jnp.arange(count) < num_tokens)[:, None, None], value, 0)
    block = min(QUERY_BLOCK, num_queries)
    reach = longest if window is None else min(longest, window - 1)  # tokens on each side
    num_keys = min(count, block + 2 * reach)
    arrays = [array.swapaxes(0, 1) for array in (query, key, value)]  # (N, T, H): CPUs multiply whole heads

    def attend_from(start: Int[Array, ""]) -> Float[Array, "N Q H"]:
        low = jnp.clip(first + start - reach, 0, count - num_keys)
        own, others = (
            jax.lax.dynamic_slice_in_dim(numbers, *each) for each in ((first + start, block), (low, num_keys))
        )
        places = (start, block), (low, num_keys), (low, num_keys)
        queries, keys, values = (
            jax.lax.dynamic_slice_in_dim(array, *place, axis=1) for array, place in zip(arrays, places, strict=True)
        )
        scores = jnp.einsum("nqh,nkh->nqk", queries, keys, preferred_element_type=jnp.float32) * scale
        is_seen = own[:, None] == others
        distances = (low + jnp.arange(num_keys)) - (first + start + jnp.arange(block))[:, None]
        if bias is not None:
            scores += bias[:, jnp.clip(distances + longest - 1, 0, bias.shape[1] - 1)]
        if window is not None:
            is_seen &= jnp.abs(distances) < window
        shares = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf))
        return jnp.einsum("nqk,nkh->nqh", shares.astype(values.dtype), values)

    num_blocks = -(-num_queries // block)
    starts = jnp.minimum(jnp.arange(num_blocks) * block, num_queries - block)  # the last one may overlap the one before
    blocks = jax.lax.map(attend_from, starts).swapaxes(1, 2)  # (blocks, Q, N, H)
    most = blocks[:-1].reshape(-1, num_heads, head_dim)
    return jnp.concatenate([most, blocks[-1, len(most) - num_queries :]])
