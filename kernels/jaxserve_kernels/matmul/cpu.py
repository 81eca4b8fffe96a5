"""matmul by the native kernels: weights are read once, in their stored type, at any number of rows."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.backend import Backend

_LANES = 16
"""Inputs must be a multiple of the widest vector the kernels may be compiled for."""
_INT8_LANES = 64
"""Divisor of the number of inputs in int8."""
_MOST_INT8_INPUTS = 1 << 16
"""So many products of bytes that are 128 too large fit an int32."""
_WEIGHTS = ("float32", "float16", "bfloat16", "int8")


def supports(x: jax.Array, weight: jax.Array, *, dynamic: bool) -> bool:
    """Return True if the kernel computes this matmul."""
    return multiplies(weight.dtype, dynamic=dynamic) and takes_inputs(x.shape[1], dynamic=dynamic)


def takes_inputs(num_inputs: int, *, dynamic: bool) -> bool:
    """Return True if there is a kernel for this number of inputs, with quantised activations if `dynamic`."""
    if dynamic:
        return num_inputs <= _MOST_INT8_INPUTS and num_inputs % _INT8_LANES == 0
    return num_inputs % _LANES == 0


def multiplies(dtype: jnp.dtype, *, dynamic: bool) -> bool:
    """Return True if there is a kernel for weights of this type, with quantised activations if `dynamic`."""
    return dtype == jnp.int8 if dynamic else str(dtype) in _WEIGHTS


def matmuls(
    x: Float[Array, "T I"],
    weights: Sequence[Num[Array, "_ I"]],
    scales: Sequence[Float[Array, "_"]],
    num_rows: Int[Array, ""] | None,
    *,
    dynamic: bool,
    backend: Backend = "native",
) -> list[Float[Array, "T _"]]:
    """See `api.matmuls`; activations are taken in float32, and padding rows come out as zeros at no cost.

    All weights are of one type, with scales for each or none at all.
    """
    count = jnp.int32(x.shape[0]) if num_rows is None else num_rows.astype(jnp.int32)
    out = [jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32) for weight in weights]
    operands = (x.astype(jnp.float32), count, *weights, *scales)
    if dynamic:
        return list(jax.ffi.ffi_call("jaxserve_matmul_int8", out)(*operands))
    return list(jax.ffi.ffi_call("jaxserve_matmul", out)(*operands, matrix_unit=backend == "native_matrix"))
