"""Products of few tokens with e4m3 weights in groups for TPUs: by the kernel for the weights of experts, of which there is one.

XLA for TPUs lays such weights out anew for a product by groups, in every step: compiled for a v6e, three times their bytes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

_MOST_TOKENS = 256
"""Rows of one tile: the weights are read once."""


def supports(x: jax.Array, weight: jax.Array, scales: jax.Array) -> bool:
    """Return True if the kernel computes this matmul."""
    from jaxserve_kernels.grouped_matmul import tpu  # imports this package

    if weight.dtype != jnp.float8_e4m3fn or len(x) > _MOST_TOKENS or _is_split():
        return False
    return (
        tpu.small_choice(x, *(jax.ShapeDtypeStruct((1, *each.shape), each.dtype) for each in (weight, scales)))
        is not None
    )


def matmul(x: Float[Array, "T I"], weight: Num[Array, "O I"], scales: Float[Array, "G O"]) -> Float[Array, "T O"]:
    """See `api.matmul`; shapes: see `supports`."""
    from jaxserve_kernels.grouped_matmul import grouped_matmul

    rows = jnp.full(1, len(x), jnp.int32)
    product: Array = grouped_matmul(x, weight[None], rows, scales[None], backend="mosaic_tpu")
    return product


def _is_split() -> bool:
    """Return True if XLA must split this matmul over devices, which it cannot do with a kernel."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1 and not mesh.are_all_axes_manual
