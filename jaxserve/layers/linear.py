"""Matrix products with weights stored output-major `[out, in]`, as checkpoints have them.

Output-major is also the faster layout for XLA:CPU's skinny products, and the tied head needs it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.layers.param import Axes, parameter


def project(x: Float[Array, "T I"], weight: Float[Array, "O I"], *, out_dtype: jnp.dtype) -> Float[Array, "T O"]:
    """x @ weight.T, accumulated in float32. Float32 weights are multiplied as float32 on every device."""
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    product = jax.lax.dot_general(
        x, weight, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    return product.astype(out_dtype)


class Linear(nnx.Module):
    """`[out, in]` weight and an optional bias."""

    def __init__(self, out_dim: int, in_dim: int, axes: Axes, dtype: jnp.dtype, *, bias: bool = False) -> None:
        self.weight = parameter((out_dim, in_dim), axes, dtype)
        self.bias = parameter((out_dim,), axes[:1], dtype) if bias else None

    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        y = project(x, self.weight[...], out_dtype=x.dtype)
        return y if self.bias is None else y + self.bias[...]
