"""linear_attention by the native kernel, in place: columns of a state stay in a core's cache from a row's first token to its last."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve_kernels import native
from jaxserve_kernels.segments import Segments
from jaxserve_kernels.states import PooledStates

_TARGET: Final = "jaxserve_linear_attention"


def is_built() -> bool:
    """Return True if a library for this host has the kernel."""
    return native.has(_TARGET)


def linear_attention(
    q: Float[Array, "T K H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T N V"],
    log_decay: Float[Array, "T N *H"],
    rate: Float[Array, "T N"] | None,
    states: PooledStates,
    segments: Segments,
    norm_eps: float | None,
) -> tuple[Float[Array, "T N V"], PooledStates]:
    """See `api.linear_attention`; padding becomes zeros."""
    rate = jnp.zeros((0, v.shape[1])) if rate is None else rate
    floats = [each.astype(jnp.float32) for each in (q, k, v, jnp.exp(log_decay), rate)]
    places = [jnp.asarray(each, jnp.int32) for each in (segments.starts, states.reads, states.layer)]
    operands = [*floats, *places, states.pool]
    results = [jax.ShapeDtypeStruct(v.shape, jnp.float32)]
    aliases: dict[int, int] = {}
    if states.writes is not None:
        aliases = {len(operands) - 1: len(results)}
        operands.append(states.writes.astype(jnp.int32))
        results.append(jax.ShapeDtypeStruct(states.pool.shape, jnp.float32))
    call = jax.ffi.ffi_call(_TARGET, results, input_output_aliases=aliases)
    added = np.float32(-1 if norm_eps is None else norm_eps)
    out, *pools = call(*operands, is_decode=segments.chunks is None, norm_eps=added)
    return out, states._replace(pool=pools[0]) if pools else states
