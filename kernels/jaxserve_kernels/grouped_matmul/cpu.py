"""grouped_matmul by the native kernels: those of matmul, on the matrix of each expert that has rows, where it lies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.grouped_matmul.reference import Scales, Weight
from jaxserve_kernels.matmul import cpu
from jaxserve_kernels.native import float4
from jaxserve_kernels.nvfp4 import TwoLevelScales


def supports(x: jax.Array, weight: jax.Array, scales: jax.Array | None, *, dynamic: bool) -> bool:
    """Return True if the kernel computes this matmul."""
    return (scales is None or scales.ndim == 2) and cpu.supports(x, weight, dynamic=dynamic)


def supports_float4(x: jax.Array, weight: jax.Array, scales: Scales) -> bool:
    """Return True if the weights are in MXFP4 or NVFP4 and their kernel computes this matmul."""
    if isinstance(scales, TwoLevelScales):
        return float4.supports(x, weight, scales.blocks)
    return scales is not None and scales.dtype == jnp.uint8 and float4.supports(x, weight, scales)


def float4_matmul(
    x: Float[Array, "R I"], weight: Weight, group_sizes: Int[Array, "E"], scales: Scales
) -> Float[Array, "R O"]:
    """See `api.grouped_matmul`; activations are taken in float32, and padding rows come out as zeros at no cost."""
    blocks, matrix = scales if isinstance(scales, TwoLevelScales) else (scales, None)
    assert blocks is not None, "e2m1 weights have scales"
    return float4.matmul(x, weight, group_sizes, blocks, matrix)


def grouped_matmul(
    x: Float[Array, "R I"],
    weight: Num[Array, "E O I"],
    group_sizes: Int[Array, "E"],
    scales: Float[Array, "E O"] | None,
    *,
    dynamic: bool,
    backend: Backend = "native",
) -> Float[Array, "R O"]:
    """See `api.grouped_matmul`; activations are taken in float32, and padding rows come out as zeros at no cost."""
    out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[1]), jnp.float32)
    rest = () if scales is None else (scales,)
    operands = (x.astype(jnp.float32), weight, group_sizes.astype(jnp.int32), *rest)
    if dynamic:
        exact: jax.Array = jax.ffi.ffi_call("jaxserve_grouped_matmul_int8", out)(*operands)
        return exact
    call = jax.ffi.ffi_call("jaxserve_grouped_matmul", out)
    result: jax.Array = call(*operands, matrix_unit=backend == "native_matrix")
    return result
