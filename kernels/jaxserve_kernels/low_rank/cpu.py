"""add_low_rank by the native kernel, which adds to each y in place."""

from __future__ import annotations

from collections.abc import Sequence
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
    ys: Sequence[Float[Array, "T _"]],
    x: Float[Array, "T I"],
    downs: Sequence[Float[Array, "A I"]],
    ups: Sequence[Float[Array, "A _"]],
    own: Bool[Array, "T A"],
    num_rows: Int[Array, ""],
) -> list[Float[Array, "T _"]]:
    """See `api.add_low_rank`. All matrices are of one type."""
    operands = (x.astype(jnp.float32), own, num_rows.astype(jnp.int32), *ys, *downs, *ups)
    out = [jax.ShapeDtypeStruct(y.shape, jnp.float32) for y in ys]
    aliases = {3 + i: i for i in range(len(out))}
    call = jax.ffi.ffi_call(_TARGET, out, input_output_aliases=aliases)
    return list(call(*operands, rounds=x.dtype == jnp.bfloat16))
