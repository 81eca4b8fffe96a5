"""Small operations on rows of up to 2^24 entries. Letters: B rows, X entries.

Indices and counts are reduced as float32, which holds every integer up to 2^24 exactly: compilers have one ready kernel for
such a reduction on CPUs, and compile several for one of integers.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped


def first_where(mask: Bool[Array, "B X"]) -> Int[Array, "B"]:
    """Return the index of the first True of each row, X in a row without one."""
    return jnp.where(mask, _indices(mask), float(mask.shape[1])).min(-1).astype(jnp.int32)


def last_where(mask: Bool[Array, "B X"]) -> Int[Array, "B"]:
    """Return the index of the last True of each row, 0 in a row without one."""
    return jnp.where(mask, _indices(mask), 0.0).max(-1).astype(jnp.int32)


def count(mask: Bool[Array, "B X"]) -> Int[Array, "B"]:
    """Return how many entries of each row are True."""
    return mask.astype(jnp.float32).sum(-1).astype(jnp.int32)


def entries(x: Shaped[Array, "B X *s"], indices: Int[Array, "B N *s1"]) -> Shaped[Array, "B N *s"]:
    """Return some entries of each row, as `jnp.take_along_axis`. The indices are those of entries: none is checked."""
    return jnp.take_along_axis(x, indices, 1, mode="promise_in_bounds")


def _indices(mask: Bool[Array, "B X"]) -> Float[Array, "X"]:
    return jnp.arange(mask.shape[1], dtype=jnp.float32)
