"""matmul in plain jax.numpy: the specification, and the implementation wherever XLA's product is the fastest."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num


def matmul(
    x: Float[Array, "T I"], weight: Num[Array, "O I"], scales: Float[Array, "O"] | None, *, dynamic: bool
) -> Float[Array, "T O"]:
    """See `api.matmul`. Float32 weights are multiplied as float32 on every device."""
    if scales is None:
        return _product(x.astype(weight.dtype), weight)
    if not dynamic:
        return _product(x, weight.astype(x.dtype)) * scales
    values, row_scales = quantize_rows(x)
    return _int8_product(values, weight).astype(jnp.float32) * row_scales[:, None] * scales


def quantize_rows(x: Float[Array, "T I"]) -> tuple[Int[Array, "T I"], Float[Array, "T"]]:
    """Symmetric int8: `values * scales[:, None]` is x within half a step of each row's largest value / 127."""
    wide = x.astype(jnp.float32)
    scales = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1), 1e-30) / 127
    return jnp.round(wide / scales[:, None]).astype(jnp.int8), scales


def _product(x: Float[Array, "T I"], weight: Float[Array, "O I"]) -> Float[Array, "T O"]:
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x, weight, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _int8_product(x: Int[Array, "T I"], weight: Int[Array, "O I"]) -> Int[Array, "T O"]:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
