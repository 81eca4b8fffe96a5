"""Matmuls with 4-bit e2m1 weights by the native kernel: dequantised some outputs at a time, in a cache, and multiplied as float32.

A result has the bits that the native kernel gives for the dequantised weights in float32, on processors of any kind.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from jaxserve_kernels.native.library import has

_TARGET = "jaxserve_float4_matmul"
_LANES, _LEAST_BLOCK = 16, 8
"""Divisors of the number of inputs, and of those of a block."""


def is_built() -> bool:
    """Return True if the library of this host has the kernel."""
    return has(_TARGET)


def supports(x: Array, values: Array, blocks: Array) -> bool:
    """Return True if the kernel computes this matmul. values: `[..., O, I / 2]`; blocks: `[..., G, O]`."""
    num_inputs, num_blocks = x.shape[1], blocks.shape[-2]
    fits = num_inputs % _LANES == 0 and num_inputs % (num_blocks * _LEAST_BLOCK) == 0
    return bool(values.dtype == jnp.uint8) and fits and is_built()


def matmul(
    x: Float[Array, "R I"],
    values: UInt8[Array, "E O P"],
    group_sizes: Int[Array, "E"],
    blocks: UInt8[Array, "E G O"] | Float[Array, "E G O"],
    matrix: Float[Array, "E 2 O"] | None,
) -> Float[Array, "R O"]:
    """Return x[r] @ weight[e].T for rows sorted by expert, `group_sizes` of each; rows after those come out as zeros at no cost.

    blocks: e8m0 exponents of MXFP4, or e4m3 scales of NVFP4, which has factors and divisors in `matrix`, too.
    """
    out = jax.ShapeDtypeStruct((x.shape[0], values.shape[1]), jnp.float32)
    operands = (x.astype(jnp.float32), values, group_sizes.astype(jnp.int32), blocks)
    result: Array = jax.ffi.ffi_call(_TARGET, out)(*operands, *(() if matrix is None else (matrix,)))
    return result
