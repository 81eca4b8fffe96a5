"""The draw of a token: its random numbers, `(positions, value) -> uniforms`, and the inverse transform."""

from __future__ import annotations

from typing import Final

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.sampling.rows import entries, first_where, last_where
from jaxserve.sampling.threefry import uniforms
from jaxserve.sampling.topk import chunked

_CHUNK: Final = 128


def seed(positions: Int[Array, "B"], value: Int[Array, "B"]) -> Float[Array, "2 B"]:
    """Return two uniform draws in [0, 1) that depend on (seed, position) only."""
    return uniforms(value, positions, 2)


def most_likely(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """Return the token of the largest logit; ties go to the lowest id."""
    return jnp.minimum(first_where(logits == logits.max(-1, keepdims=True)), logits.shape[1] - 1)


def categorical(weights: Float[Array, "B V"], uniform: Float[Array, "2 B"]) -> Int[Array, "B"]:
    """Draw by inverse transform in two stages: a chunk by its mass, then a token within it.

    Two independent draws keep both stages exact to float32 and cost two uniforms a row instead of
    one per token. In a few thousand entries a row's sums have one order, however many rows there are.
    """
    chunks = chunked(weights, _CHUNK, 0.0)  # (B, C, X)
    size = max(chunks.shape[1:])  # of both stages: their kernels are the same then, and are compiled once
    chunk = _inverse(_filled(chunks.sum(-1), size), uniform[0])
    inside = entries(chunks, chunk[:, None, None])[:, 0]  # (B, X)
    return chunk * _CHUNK + _inverse(_filled(inside, size), uniform[1])


def _filled(weights: Float[Array, "B X"], size: int) -> Float[Array, "B Y"]:
    """Return rows of `size` entries, the further ones zero."""
    return jnp.pad(weights, ((0, 0), (0, size - weights.shape[1])))


def _inverse(weights: Float[Array, "B X"], uniform: Float[Array, "B"]) -> Int[Array, "B"]:
    """Return the first entry whose cumulative weight exceeds `uniform` of the total; never one of weight zero."""
    cumulative, has_weight = jnp.cumsum(weights, -1), weights > 0
    first = first_where((cumulative > (uniform * cumulative[:, -1])[:, None]) & has_weight)
    # Rounding can leave none above for a draw next to 1: then it is the last entry with weight.
    return jnp.where(first < weights.shape[1], first, last_where(has_weight))
