"""add_low_rank by the native kernel, which adds to y in place."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve_kernels import native

_TARGET: Final = "jaxserve_add_low_rank"
_LANES: Final = 16
"""Divisor of the number of inputs: the widest vector the kernels may be compiled for."""
_WEIGHTS: Final = ("float32", "float16", "bfloat16")


def supports(x: jax.Array, down: jax.Array, up: jax.Array) -> bool:
    """Return True if the kernel computes this addition."""
    has_types = x.dtype in (jnp.float32, jnp.bfloat16) and down.dtype == up.dtype and str(up.dtype) in _WEIGHTS
    return x.shape[1] % _LANES == 0 and has_types and native.has(_TARGET)


def add_low_rank(
    y: Float[Array, "T O"],
    x: Float[Array, "T I"],
    down: Float[Array, "A I"],
    up: Float[Array, "A O"],
    own: Bool[Array, "T A"],
    num_rows: Int[Array, ""],
) -> Float[Array, "T O"]:
    """See `api.add_low_rank`."""
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(y.shape, jnp.float32), input_output_aliases={0: 0})
    added: jax.Array = call(
        y, x.astype(jnp.float32), down, up, own, num_rows.astype(jnp.int32), rounds=x.dtype == jnp.bfloat16
    )
    return added
