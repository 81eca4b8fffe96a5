"""Sums and exponentials whose last bits do not depend on the number of rows.

XLA:CPU chooses how it adds up a row, and how it computes exponentials beside a sum or a maximum, by the size of the whole array, so that
a row's last bit could depend on the rows beside it.
"""

from __future__ import annotations

import math
from typing import Final

import jax.numpy as jnp
from jaxtyping import Array, Float

_ADDED_ALIKE: Final = 4096
"""Elements of an array from which on XLA:CPU uses one kernel for each row, however many rows there are."""


def padded_alike(values: Float[Array, "*rows D"]) -> Float[Array, "*more D"]:
    """Return values with as many rows of zeros after them as it takes for all rows to be summed in that order."""
    num_missing = _ADDED_ALIKE - values.size
    if num_missing <= 0:
        return values
    num_more = -(-num_missing // math.prod(values.shape[1:]))
    return jnp.pad(values, [(0, num_more), *[(0, 0)] * (values.ndim - 1)])


def wide_alike(logits: Float[Array, "B V"]) -> Float[Array, "B W"]:
    """Return logits with as many columns of -inf after them as it takes for their exponentials and sums to be computed in one way.

    Only vocabularies of fewer than 4,096 tokens get any.
    """
    num_missing = max(0, _ADDED_ALIKE - logits.shape[1])
    return jnp.pad(logits, ((0, 0), (0, num_missing)), constant_values=-jnp.inf) if num_missing else logits
