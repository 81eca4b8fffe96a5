"""linear_attention by the native kernel, in place: columns of a state stay in a core's cache from a row's first token to its last."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve_kernels import native
from jaxserve_kernels.linear_attention.states import PooledStates
from jaxserve_kernels.segments import Segments

_WRITING: Final = "jaxserve_linear_attention"
_READING: Final = "jaxserve_read_linear_attention"
"""The kernel that leaves states as they are."""


def is_built() -> bool:
    """Return True if a library for this host has the kernel."""
    return native.has(_WRITING)


def linear_attention(
    q: Float[Array, "T K H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T N V"],
    log_decay: Float[Array, "T N *H"],
    rate: Float[Array, "T N"] | None,
    states: PooledStates,
    segments: Segments,
) -> tuple[Float[Array, "T N V"], PooledStates]:
    """See `api.linear_attention`; padding becomes zeros."""
    rate = jnp.zeros((0, v.shape[1])) if rate is None else rate
    floats = [each.astype(jnp.float32) for each in (q, k, v, jnp.exp(log_decay), rate)]
    slots = [states.reads] if states.writes is None else [states.reads, states.writes]
    places = [jnp.asarray(each, jnp.int32) for each in (segments.starts, *slots, states.layer)]
    operands = (*floats, *places, states.pool)
    made = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    is_decode = segments.chunks is None
    if states.writes is None:
        out: Array = jax.ffi.ffi_call(_READING, made)(*operands, is_decode=is_decode)
        return out, states
    after = jax.ShapeDtypeStruct(states.pool.shape, jnp.float32)
    call = jax.ffi.ffi_call(_WRITING, (made, after), input_output_aliases={len(operands) - 1: 1})
    out, pool = call(*operands, is_decode=is_decode)
    return out, states._replace(pool=pool)
