"""add_low_rank in plain jax.numpy: the specification. All rows are multiplied with the ranks of all adapters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def add_low_rank(
    y: Float[Array, "T O"],
    x: Float[Array, "T I"],
    down: Float[Array, "A I"],
    up: Float[Array, "A O"],
    own: Bool[Array, "T A"],
) -> Float[Array, "T O"]:
    """See `api.add_low_rank`."""
    ranks = jnp.where(own, _matmul(x, down), 0).astype(x.dtype)
    return y + _matmul(ranks, up.T)


def _matmul(x: Float[Array, "T I"], weight: Float[Array, "O I"]) -> Float[Array, "T O"]:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("ti,oi->to", x, weight.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)
