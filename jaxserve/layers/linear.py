"""Matrix products with weights stored output-major `[out, in]`, as checkpoints have them.

Output-major is also the faster layout for XLA:CPU's skinny products, and the tied head needs it.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.matmul import matmul
from jaxtyping import Array, Float, Int

from jaxserve.layers.numerics import Numerics
from jaxserve.layers.param import Axes, parameter


class Matrix(nnx.Module):
    """An `[out, in]` weight as `numerics` stores it: in its type, or int8 with a scale per output."""

    def __init__(self, out_dim: int, in_dim: int, axes: Axes, numerics: Numerics) -> None:
        stored = jnp.dtype(jnp.int8) if numerics.is_int8 else numerics.weights
        self.weight = parameter((out_dim, in_dim), axes, stored)
        self.weight_scale = parameter((out_dim,), axes[:1], jnp.dtype(jnp.float32)) if numerics.is_int8 else None
        self.numerics = numerics

    def multiply(self, x: Float[Array, "T I"], num_rows: Int[Array, ""]) -> Float[Array, "T O"]:
        """x @ weight.T in float32; rows behind `num_rows` are padding."""
        scales = None if self.weight_scale is None else self.weight_scale[...]
        dynamic = self.numerics.quantization == "int8"
        return matmul(x, self.weight[...], scales, num_rows, dynamic=dynamic, backend=self.numerics.backend)


class Linear(Matrix):
    """`[out, in]` weight and an optional bias."""

    def __init__(self, out_dim: int, in_dim: int, axes: Axes, numerics: Numerics, *, bias: bool = False) -> None:
        super().__init__(out_dim, in_dim, axes, numerics)
        self.bias = parameter((out_dim,), axes[:1], numerics.vectors) if bias else None

    def __call__(self, x: Float[Array, "T I"], num_rows: Int[Array, ""]) -> Float[Array, "T O"]:
        y = self.multiply(x, num_rows).astype(x.dtype)
        return y if self.bias is None else y + self.bias[...]
