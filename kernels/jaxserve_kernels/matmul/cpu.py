"""matmul by the native kernels: weights are read once, in their stored type, at any number of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels import native
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
    if dynamic:
        is_exact = x.shape[1] <= _MOST_INT8_INPUTS
        return multiplies(weight.dtype, dynamic=True) and is_exact and x.shape[1] % _INT8_LANES == 0
    return multiplies(weight.dtype, dynamic=False) and x.shape[1] % _LANES == 0


def multiplies(dtype: jnp.dtype, *, dynamic: bool) -> bool:
    """Return True if there is a kernel for weights of this type; `dynamic` ones need AVX512-VNNI or ARM64, and must have been built."""
    return dtype == jnp.int8 and native.has("jaxserve_matmul_int8") if dynamic else str(dtype) in _WEIGHTS


def matmul(
    x: Float[Array, "T I"],
    weight: Num[Array, "O I"],
    scales: Float[Array, "O"] | None,
    num_rows: Int[Array, ""] | None,
    *,
    dynamic: bool,
    backend: Backend = "native",
) -> Float[Array, "T O"]:
    """See `api.matmul`; activations are taken in float32, and padding rows come out as zeros at no cost."""
    out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    count = jnp.int32(x.shape[0]) if num_rows is None else num_rows.astype(jnp.int32)
    operands = (x.astype(jnp.float32), weight, count) + (() if scales is None else (scales,))
    if dynamic:
        exact: jax.Array = jax.ffi.ffi_call("jaxserve_matmul_int8", out)(*operands)
        return exact
    if backend == "native_panels" and scales is None:
        packed: jax.Array = jax.ffi.ffi_call("jaxserve_matmul_panels", out)(*operands)
        return packed
    product: jax.Array = jax.ffi.ffi_call("jaxserve_matmul", out)(*operands, matrix_unit=backend == "native_matrix")
    return product
