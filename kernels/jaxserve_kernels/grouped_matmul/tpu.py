"""Products with the weights of experts on TPUs: JAX's own kernel, which reads `[E, O, I]` as it lies.

XLA's `ragged_dot` wants the inputs ahead of the outputs, and copies all weights into that order at each call.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve_kernels.grouped_matmul.tuning import load

_LANES = 128
_SUBLANES = 16


def supports(x: jax.Array, weight: jax.Array) -> bool:
    """Whether the kernel computes this product."""
    num_outputs, num_inputs = weight.shape[1:]
    return x.dtype == weight.dtype == jnp.bfloat16 and num_outputs % _LANES == num_inputs % _LANES == 0


def grouped_matmul(
    x: Float[Array, "R I"], weight: Float[Array, "E O I"], group_sizes: Int[Array, "E"], *, is_emulated: bool = False
) -> Float[Array, "R O"]:
    """See `api.grouped_matmul`."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # imports Pallas

    sizes, (num_rows, num_inputs), num_outputs = load("tpu"), x.shape, weight.shape[1]
    rows = min(sizes["rows"], -(-num_rows // _SUBLANES) * _SUBLANES)
    inputs = next(each for each in sizes["inputs"] if num_inputs % each == 0)
    padded = jnp.pad(x, ((0, -num_rows % rows), (0, 0)))
    product: Array = gmm(
        padded,
        weight,
        group_sizes,
        tiling=(rows, inputs, min(sizes["outputs"], num_outputs)),
        transpose_rhs=True,
        interpret=is_emulated,
    )
    return product[:num_rows]
