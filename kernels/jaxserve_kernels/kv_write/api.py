"""Public entry of kv_write. Letters as in `paged_attention.api`."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.kv_write import reference
from jaxserve_kernels.kv_write.scales import KVScales

E4M3_BITS: Final = jnp.dtype("uint8")
"""The type of a pool on CPUs whose numbers are e4m3. XLA:CPU would convert the whole pool for each write to one of 8-bit floats."""


def kv_write(
    k_pages: Num[Array, "L P K S H"],
    v_pages: Num[Array, "L P K S H"],
    layer: Int[Array, ""],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pages: Int[Array, "T"],
    slots: Int[Array, "T"],
    *,
    scales: KVScales | None = None,
) -> tuple[Num[Array, "L P K S H"], Num[Array, "L P K S H"]]:
    """Put token t's key and value at `[layer, pages[t], :, slots[t]]`.

    Returns the pools; under donation they are the same buffers. Padding tokens all write to the null
    page 0, in any order; every other (page, slot) must occur once. In a pool of 8-bit numbers they are divided by
    `scales` and rounded to the nearest number there is.
    """
    return reference.kv_write(k_pages, v_pages, layer, *stored(k, v, k_pages.dtype, scales), pages, slots)


def stored(
    k: Float[Array, "T K H"], v: Float[Array, "T K H"], dtype: jnp.dtype, scales: KVScales | None
) -> tuple[Num[Array, "T K H"], Num[Array, "T K H"]]:
    """Keys and values as a pool of this type holds them."""
    if scales is not None:
        of_keys, of_values = scales.by_number
        k, v = k / of_keys, v / of_values
    return storable(k, dtype), storable(v, dtype)


def storable(x: Float[Array, "*s"], dtype: jnp.dtype) -> Array:
    """x in the type of the pool, what is beyond its range at its end. Never NaN or infinite.

    Kernels multiply what they must not see by zero, and pages are used again: a number that is none would
    spread from one request to others.
    """
    if dtype == E4M3_BITS:
        return jax.lax.bitcast_convert_type(storable(x, jnp.dtype(jnp.float8_e4m3fn)), dtype)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    info: Any = jnp.iinfo(dtype) if is_integer else jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    limited = jnp.clip(jnp.nan_to_num(x.astype(jnp.float32)), float(info.min), float(info.max))
    return (jnp.round(limited) if is_integer else limited).astype(dtype)


def numbers(pages: Num[Array, "*s"]) -> Array:
    """Return what pages that were read from a pool hold: those with bits of e4m3 as e4m3, others as they are."""
    return jax.lax.bitcast_convert_type(pages, jnp.float8_e4m3fn) if pages.dtype == E4M3_BITS else pages
