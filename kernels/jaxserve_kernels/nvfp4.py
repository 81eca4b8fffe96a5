"""NVFP4: 4-bit e2m1 numbers in blocks, each with an e4m3 scale, under float32 scales of the whole matrix.

    values  uint8 `[..., I / 2]`, the bits of two numbers in a byte, the first in its low half (see `mxfp4` for the numbers); on TPUs
            int32 `[I / 8, O]`, see `tpu_words`
    blocks  float8_e4m3fn `[G, O]`, the scale of each block of I / G neighbouring inputs
    matrix  float32 `[2, O]`, for each output a factor and a divisor: exporters store one of the two, and the other is 1

    w[o, i] = number[o, i] * (blocks[i's block, o] * matrix[0, o] / matrix[1, o])

All of it is computed in float32 in this order, so that a weight has the bits of the exporter's own definition. A factor or
divisor belongs to outputs because matrices of several scales may be fused.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32, UInt8

from jaxserve_kernels.backend import NATIVE, Backend
from jaxserve_kernels.matmul.gpu import grouped_choice
from jaxserve_kernels.matmul.tpu import words_choice
from jaxserve_kernels.mxfp4 import numbers_at, places_of
from jaxserve_kernels.native import float4

_CHUNK_WEIGHTS = 1 << 19
"""Weights that a CPU upcasts at a time, 2 MB: they stay in a cache until they are multiplied."""
_LEAST_CHUNK = 16
"""Outputs."""


class TwoLevelScales(NamedTuple):
    """Scales of one matrix, or of one for each expert, whose arrays then have E as their first dimension."""

    blocks: Float[Array, "*E G O"]
    matrix: Float[Array, "*E 2 O"]


def dequantize(values: UInt8[Array, "O P"], scales: TwoLevelScales, dtype: jnp.dtype | type) -> Float[Array, "O I"]:
    """Return a matrix as floats: rounded once from float32."""
    factors, divisors = scales.matrix
    steps = scales.blocks.astype(jnp.float32) * factors  # (G, O)
    # XLA would multiply by the rounded reciprocals of what it sees broadcast.
    steps /= jax.lax.optimization_barrier(jnp.broadcast_to(divisors, steps.shape))
    numbers = numbers_at(places_of(values)).reshape(len(values), len(steps), -1)
    wide: Array = (numbers * steps.T[:, :, None]).reshape(len(values), -1)
    return wide.astype(dtype)


def matmul(
    x: Float[Array, "T I"],
    values: UInt8[Array, "O P"] | Int32[Array, "W O"],
    scales: TwoLevelScales,
    num_rows: Int[Array, ""] | None = None,
    *,
    backend: Backend = "reference",
) -> Float[Array, "T O"]:
    """Return x @ weight.T, accumulated and returned in float32: the weight is upcast first, to the dtype of x.

    num_rows: rows of x after these are padding, whose results have no meaning. Hopper GPUs upcast in registers, if rows are few, and TPUs
    words in VMEM: numbers times block scales, which is exact in bfloat16; the scales of the matrix are applied to the result. CPUs upcast
    some outputs at a time. Elsewhere XLA upcasts the whole matrix, but for one row, which is multiplied number by number in one kernel that reads the
    weight as it is stored.
    """
    if values.dtype == jnp.int32:
        return _with_words(x, values, scales, backend)
    sizes = grouped_choice(x, values, scales.blocks) if backend == "mosaic_gpu" else None
    if sizes is not None:
        from jaxserve_kernels.matmul.gpu import skinny  # imports Pallas

        result: Array = skinny.matmul(x, values, scales.blocks, tuning=sizes)
        return result * _matrix_scale(scales)
    if backend in NATIVE and float4.supports(x, values, scales.blocks):
        count = jnp.int32(len(x)) if num_rows is None else num_rows
        return float4.matmul(x, values[None], count[None], scales.blocks[None], scales.matrix[None])
    found: Array = jax.lax.platform_dependent(x, values, scales, cpu=_by_outputs, default=_whole)
    return found


def _with_words(
    x: Float[Array, "T I"], words: Int32[Array, "W O"], scales: TwoLevelScales, backend: Backend
) -> Float[Array, "T O"]:
    tuned = words_choice(x, words.shape[1], 4 * len(words) + len(scales.blocks)) if backend == "mosaic_tpu" else None
    if tuned is None:
        return _whole(x, bytes_of(words), scales)
    from jaxserve_kernels.matmul.tpu import words as kernel  # imports Pallas

    result: Array = kernel.numbers_matmul(x, words, scales.blocks, tuning=tuned, has_bfloat16=kernel.has_bfloat16())
    return result * _matrix_scale(scales)


def bytes_of(words: Int32[Array, "W O"]) -> UInt8[Array, "O P"]:
    """Return the bytes of numbers in words."""
    num_outputs = words.shape[1]
    own = words.reshape(-1, 1, 32, num_outputs)  # (units, k, r, outputs)
    places = 4 * jnp.arange(4)[:, None, None]
    low, high = (own >> places & 15), (own >> places + 16 & 15)
    packed = (low | high << 4).astype(jnp.uint8).reshape(-1, num_outputs)
    return packed.T


def _whole(x: Float[Array, "T I"], values: UInt8[Array, "O P"], scales: TwoLevelScales) -> Float[Array, "T O"]:
    """Numbers times the scales of their blocks have six digits, which any dtype of x holds: those of the matrix scale the result."""
    if len(x) == 1:
        result = (_in_steps(values, scales.blocks, jnp.float32) * x.astype(jnp.float32)).sum(-1)[None]
    else:
        result = _matmul(x, _in_steps(values, scales.blocks, x.dtype))
    return result * _matrix_scale(scales)


def _matrix_scale(scales: TwoLevelScales) -> Float[Array, "O"]:
    """Return what the weights of each output are multiplied with, beside the scales of their blocks."""
    factors, divisors = scales.matrix
    scale: Array = factors / divisors
    return scale


def _in_steps(values: UInt8[Array, "O P"], blocks: Float[Array, "G O"], dtype: jnp.dtype | type) -> Float[Array, "O I"]:
    """Return numbers times the scales of their blocks, written so that XLA for GPUs makes one loop of it."""
    bits = (values[:, :, None] >> jnp.array([0, 4], jnp.uint8)).reshape(len(values), len(blocks), -1)
    places = (bits & 7).astype(dtype)
    sizes = 2 * places - 0.5 * jnp.minimum(places, 4) - jnp.minimum(places, 6)  # `mxfp4.numbers_at`
    numbers = jnp.where((bits & 8) == 0, sizes, -sizes)
    wide: Array = (numbers * blocks.T[:, :, None].astype(dtype)).reshape(len(values), -1)
    return wide


def _by_outputs(x: Float[Array, "T I"], values: UInt8[Array, "O P"], scales: TwoLevelScales) -> Float[Array, "T O"]:
    """Upcast and multiply chunk after chunk of outputs. The last chunk may compute outputs of the one before again."""
    num_outputs, num_inputs = len(values), x.shape[1]
    size = min(max(_LEAST_CHUNK, _CHUNK_WEIGHTS // num_inputs), num_outputs)
    values, scales = jax.lax.optimization_barrier((values, scales))  # upcast in the loop, never all of them before it

    def go_on(chunk: Int[Array, ""], out: Float[Array, "T O"]) -> Float[Array, "T O"]:
        start = jnp.minimum(chunk * size, num_outputs - size)
        own = jax.lax.dynamic_slice_in_dim(values, start, size)
        steps = TwoLevelScales(*(jax.lax.dynamic_slice_in_dim(each, start, size, 1) for each in scales))
        return jax.lax.dynamic_update_slice_in_dim(out, _matmul(x, dequantize(own, steps, x.dtype)), start, 1)

    nothing = jnp.zeros((len(x), num_outputs), jnp.float32)
    result: Array = jax.lax.fori_loop(0, -(-num_outputs // size), go_on, nothing)
    return result


def _matmul(x: Float[Array, "T I"], weight: Float[Array, "O I"]) -> Float[Array, "T O"]:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, dimensions, precision=precision, preferred_element_type=jnp.float32)
