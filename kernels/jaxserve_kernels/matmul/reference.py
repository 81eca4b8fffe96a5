"""matmul in plain jax.numpy: the specification, and the implementation wherever XLA's matmul is the fastest."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

_CHUNK_WEIGHTS = 1 << 19
"""Weights that a CPU upcasts at a time, 2 MB: they stay in a cache until they are multiplied."""
_LEAST_CHUNK = 16
"""Outputs."""
_LEAST_ROUNDED = 1024
"""Fewest tokens whose results are rounded by the matmul itself. With fewer, libraries for GPUs cut the inputs into parts, and
may round the sum of each."""


def rounded_matmul(x: Float[Array, "T I"], weight: Num[Array, "O I"]) -> Float[Array, "T O"]:
    """Return x @ weight.T in the dtype of x: sums in float32, rounded once.

    cuBLASLt then writes half the bytes, and no other launch reads and rounds them: such launches were 6 % of a prompt's step of
    2,048 tokens on an H200.
    """
    if weight.dtype == x.dtype and len(x) >= _LEAST_ROUNDED:
        return _matmul(x, weight, x.dtype)
    return _matmul(x.astype(weight.dtype), weight).astype(x.dtype)


def matmul(
    x: Float[Array, "T I"], weight: Num[Array, "O I"], scales: Float[Array, "O"] | None, *, dynamic: bool
) -> Float[Array, "T O"]:
    """See `api.matmul`. Float32 weights are multiplied as float32 on every device.

    Of e4m3 by e4m3 XLA makes one matmul on the tensor cores of GPUs that have it (Ada, Hopper, Blackwell); their sums
    have fewer bits than float32. Elsewhere it widens both, but for CPUs, which would multiply them one by one: float32
    activations, which they always have, are widened here.
    """
    if scales is None:
        return _matmul(x.astype(weight.dtype), weight)
    if not dynamic:
        return _matmul(x, weight.astype(x.dtype)) * scales
    values, row_scales = quantize_rows(x, weight.dtype)
    if weight.dtype == jnp.int8:
        result = _matmul(values, weight, jnp.int32).astype(jnp.float32)
    elif x.dtype == jnp.float32:
        result = _matmul(values.astype(jnp.float32), weight.astype(jnp.float32))
    else:
        result = _matmul(values, weight)
    return result * row_scales[:, None] * scales


def grouped_matmul(
    x: Float[Array, "T I"], weight: Num[Array, "O I"], scales: Float[Array, "G O"]
) -> Float[Array, "T O"]:
    """See `api.matmul`. e4m3 weights are upcast by CPUs some outputs at a time."""
    if weight.dtype == jnp.float8_e4m3fn:
        result: Array = jax.lax.platform_dependent(x, weight, scales, cpu=_by_outputs, default=_by_groups)
        return result
    return _by_groups(x, weight, scales)


def _by_groups(x: Float[Array, "T I"], weight: Num[Array, "O I"], scales: Float[Array, "G O"]) -> Float[Array, "T O"]:
    """Few tokens: a matmul for each group, scaled and added. The weights go into it as they are stored, and what is
    written is 2 x 4 T G O bytes with reading it back; widening, unless a compiler does it inside of the matmul, moves
    4 I O. More tokens: widened.
    """
    (num_tokens, num_inputs), (num_groups, num_outputs) = x.shape, scales.shape
    size = num_inputs // num_groups
    if 2 * num_tokens <= size:
        parts = jnp.einsum(
            "tgi,ogi->gto",
            x.reshape(num_tokens, num_groups, size),
            weight.reshape(num_outputs, num_groups, size).astype(x.dtype),
            precision=_precision(x.dtype),
            preferred_element_type=jnp.float32,
        )
        return (parts * scales[:, None, :]).sum(0)
    return _matmul(x, _widened(weight, scales, x.dtype))


def _by_outputs(
    x: Float[Array, "T I"], weight: Float[Array, "O I"], scales: Float[Array, "G O"]
) -> Float[Array, "T O"]:
    """Upcast and multiply chunk after chunk of outputs: XLA for CPUs would write the whole matrix as float32 first.

    Weights are taken as bits: it would take the upcast of all of them out of the loop. The last chunk may compute outputs of the
    one before again.
    """
    x = x.astype(jnp.float32)
    num_outputs, num_inputs = weight.shape
    size = min(max(_LEAST_CHUNK, _CHUNK_WEIGHTS // num_inputs), num_outputs)
    bits = jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(weight), jnp.uint8)

    def go_on(chunk: Int[Array, ""], out: Float[Array, "T O"]) -> Float[Array, "T O"]:
        start = jnp.minimum(chunk * size, num_outputs - size)
        own = jax.lax.bitcast_convert_type(jax.lax.dynamic_slice_in_dim(bits, start, size), weight.dtype)
        wide = _widened(own, jax.lax.dynamic_slice_in_dim(scales, start, size, 1), x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, _matmul(x, wide), start, 1)

    nothing = jnp.zeros((len(x), num_outputs), jnp.float32)
    result: Array = jax.lax.fori_loop(0, -(-num_outputs // size), go_on, nothing)
    return result


def _widened(weight: Num[Array, "O I"], scales: Float[Array, "G O"], dtype: jnp.dtype) -> Float[Array, "O I"]:
    """Return the weights times their scales, rounded once."""
    by_group = weight.reshape(len(weight), len(scales), -1).astype(jnp.promote_types(dtype, scales.dtype))
    return (by_group * scales.T[:, :, None]).astype(dtype).reshape(weight.shape)


def offset_matmul(x: Float[Array, "T I"], offsets: Float[Array, "G O"]) -> Float[Array, "T O"]:
    """Return the part of the result that comes from offsets per output and group of inputs: sums of inputs times offsets."""
    by_group = x.reshape(x.shape[0], len(offsets), -1).astype(jnp.float32)
    return jnp.matmul(by_group.sum(-1), offsets, precision=jax.lax.Precision.HIGHEST)


def quantize_rows(
    x: Float[Array, "T I"], dtype: jnp.dtype | type = jnp.int8
) -> tuple[Num[Array, "T I"], Float[Array, "T"]]:
    """Symmetric: `values * scales[:, None]` is x; each row's largest value becomes the largest of int8 or e4m3."""
    is_int8 = dtype == jnp.int8
    wide = x.astype(jnp.float32)
    scales = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1), 1e-30) / (127 if is_int8 else 448)
    scaled = wide / scales[:, None]
    return (jnp.round(scaled) if is_int8 else scaled).astype(dtype), scales


def _matmul(
    x: Num[Array, "T I"], weight: Num[Array, "O I"], dtype: jnp.dtype | type = jnp.float32
) -> Num[Array, "T O"]:
    dimensions = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, dimensions, precision=_precision(weight.dtype), preferred_element_type=dtype)


def _precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Return HIGHEST for float32, and for e4m3: by default, Hopper's tensor cores keep some 14 bits of a sum
    (DeepSeek-V3 report, section 3.3.2). On an H100 results were wrong by up to 1.6 % over 1,024 inputs.
    """
    return jax.lax.Precision.HIGHEST if dtype in (jnp.float32, jnp.float8_e4m3fn) else None
