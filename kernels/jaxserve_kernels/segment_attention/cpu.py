"""attend_segments by the native kernel: scores stay in a core's cache."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve_kernels import native

_TARGET: Final = "jaxserve_segment_attention"
_EVERYWHERE: Final = 1 << 30
"""A window of more tokens than a segment has."""


def is_built() -> bool:
    """Return True if a library for this host has the kernel."""
    return native.has(_TARGET)


def attend_segments(
    query: Float[Array, "Q N H"],
    key: Float[Array, "T N H"],
    value: Float[Array, "T N H"],
    numbers: Int[Array, "T"],
    num_tokens: Int[Array, ""],
    first: Int[Array, ""],
    *,
    scale: float,
    window: int | None = None,
    bias: Float[Array, "N R"] | None = None,
) -> Float[Array, "Q N H"]:
    """See `api.attend_segments`; everything is taken in float32, and padding becomes zeros."""
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(query.shape, jnp.float32))
    arrays = [array.astype(jnp.float32) for array in (query, key, value)]
    numbers, num_tokens, first = (each.astype(jnp.int32) for each in (numbers, num_tokens, first))
    biases = jnp.zeros((query.shape[1], 0), jnp.float32) if bias is None else bias.astype(jnp.float32)
    options = {"scale": np.float32(scale), "window": np.int32(_EVERYWHERE if window is None else window)}
    found: jax.Array = call(*arrays, numbers, num_tokens, first, biases, **options)
    return found.astype(value.dtype)
