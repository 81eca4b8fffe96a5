"""MXFP4 (OCP Microscaling Formats, version 1.0): 4-bit e2m1 numbers in blocks, each with a scale that is a power of two.

    values     int4 `[..., I]`, the signed place of a number's size among the eight; or uint8 `[..., I / 2]`, the bits of two
               numbers in a byte, the first in its low half, where a program cannot take an int4 array (XLA for CPUs)
    exponents  uint8 `[G, O]`, e8m0: 2 ** (exponent - 127); 255 is NaN. A block is I / G neighbouring inputs

Four bits s e e m are a sign, and the number m / 2 if e is 0, else (1 + m / 2) * 2 ** (e - 1): the last three bits are its
place among 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

_MANTISSA_BITS = 23
_LEAST, _NAN = 0x0040_0000, 0x7FC0_0000
"""Bits of 2 ** -127, which float32 has as a subnormal number, and of NaN."""


def is_packed(values: Array) -> bool:
    """Return True if two numbers share a byte."""
    return bool(values.dtype == jnp.uint8)


def numbers_at(places: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Return the numbers at these places, -7 to 7, exactly in any type of 8 digits.

    Neighbouring sizes are 0.5 apart, from 2 on 1, and the last ones 2, so a few bounds replace a table.
    """
    return 2 * places - 0.5 * jnp.clip(places, -4, 4) - jnp.clip(places, -6, 6)


def scales_of(exponents: UInt8[Array, "*S"]) -> Float[Array, "*S"]:
    """Return the scales of e8m0 exponents, float32, exactly."""
    wide = exponents.astype(jnp.int32)
    bits = jnp.where(wide == 0, _LEAST, jnp.where(wide == 255, _NAN, wide << _MANTISSA_BITS))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def places_of(values: Int[Array, "O I"] | UInt8[Array, "O P"]) -> Float[Array, "O _"]:
    """Return the signed place of each number in float32."""
    if not is_packed(values):
        return values.astype(jnp.float32)
    bits = jnp.stack([values, values >> 4], axis=-1).reshape(len(values), -1)
    sizes = (bits & 7).astype(jnp.float32)
    return jnp.where((bits & 8) == 0, sizes, -sizes)


def dequantize(
    values: Int[Array, "O I"] | UInt8[Array, "O P"], exponents: UInt8[Array, "G O"], dtype: jnp.dtype | type
) -> Float[Array, "O _"]:
    """Return a matrix as floats: exact in float32 and bfloat16, but for scales at the ends of their range."""
    numbers = numbers_at(places_of(values)).reshape(len(values), len(exponents), -1)
    wide = numbers * scales_of(exponents).T[:, :, None]
    return wide.reshape(len(values), -1).astype(dtype)


def matmul(
    x: Float[Array, "T I"], values: Int[Array, "O I"] | UInt8[Array, "O P"], exponents: UInt8[Array, "G O"]
) -> Float[Array, "T O"]:
    """Return x @ weight.T, accumulated and returned in float32: the weight is upcast first, to the dtype of x.

    One row is multiplied number by number: XLA for GPUs makes one kernel of that, which reads the weight as it is stored,
    and writes an upcast copy for some shapes of a matmul.
    """
    if len(x) == 1:
        return (dequantize(values, exponents, jnp.float32) * x.astype(jnp.float32)).sum(-1)[None]
    wide = dequantize(values, exponents, x.dtype)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, wide, dimensions, precision=precision, preferred_element_type=jnp.float32)
