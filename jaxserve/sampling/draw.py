"""The draw of a token: its random numbers, `(positions, value) -> uniforms`, and the inverse transform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.sampling.topk import CHUNK, chunked


def seed(positions: Int[Array, "B"], value: Int[Array, "B"]) -> Float[Array, "2 B"]:
    """Return two uniform draws in [0, 1) that depend on (seed, position) only (threefry, arXiv 1103.1580)."""

    def draw(seed: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position), (2,))

    return jax.vmap(draw)(value, positions).T


def most_likely(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """Return the token of the largest logit; ties go to the lowest id."""
    return _first_where(logits == logits.max(-1, keepdims=True))


def categorical(weights: Float[Array, "B V"], uniform: Float[Array, "2 B"]) -> Int[Array, "B"]:
    """Draw by inverse transform in two stages: a chunk by its mass, then a token within it.

    Two independent draws keep both stages exact to float32 and cost two uniforms a row instead of
    one per token.
    """
    chunks = chunked(weights, 0.0)  # (B, C, X)
    chunk = _inverse(chunks.sum(-1), uniform[0])
    inside = jnp.take_along_axis(chunks, chunk[:, None, None], 1)[:, 0]  # (B, X)
    return chunk * CHUNK + _inverse(inside, uniform[1])


def _inverse(weights: Float[Array, "B X"], uniform: Float[Array, "B"]) -> Int[Array, "B"]:
    """Return the first entry whose cumulative weight exceeds `uniform` of the total; never one of weight zero."""
    cumulative = jnp.cumsum(weights, -1)
    above = (cumulative > (uniform * cumulative[:, -1])[:, None]) & (weights > 0)
    # Rounding can leave none above for a draw next to 1: then it is the last entry with weight.
    last = weights.shape[1] - 1 - _first_where(weights[:, ::-1] > 0)
    return jnp.where(above.any(-1), _first_where(above), last)


def _first_where(mask: Array) -> Int[Array, "B"]:
    """Return the index of the first True of each row, by a minimum: half the cost of argmax on a CPU at 32 rows."""
    index = jnp.arange(mask.shape[1], dtype=jnp.int32)
    return jnp.minimum(jnp.where(mask, index, mask.shape[1]).min(-1), mask.shape[1] - 1)
