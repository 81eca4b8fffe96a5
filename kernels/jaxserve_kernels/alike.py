"""Sums whose order does not depend on the number of rows.

XLA:CPU chooses how it adds up a row by the size of the whole array, so that a row's last bit could depend on the rows beside it.
"""

from __future__ import annotations

import math
from typing import Final

import jax.numpy as jnp
from jaxtyping import Array, Float

_ADDED_ALIKE: Final = 4096
"""Elements of an array from which on XLA:CPU sums every row in the same order, however many rows there are."""


def padded_alike(values: Float[Array, "*rows D"]) -> Float[Array, "*more D"]:
    """Return values with as many rows of zeros after them as it takes for all rows to be summed in that order."""
    num_missing = _ADDED_ALIKE - values.size
    if num_missing <= 0:
        return values
    num_more = -(-num_missing // math.prod(values.shape[1:]))
    return jnp.pad(values, [(0, num_more), *[(0, 0)] * (values.ndim - 1)])


def sums_alike(values: Float[Array, "*rows D"]) -> Float[Array, "*rows"]:
    """Return the sums over the last axis: those of a row have the same bits among any number of rows."""
    return padded_alike(values).sum(-1)[: len(values)]
