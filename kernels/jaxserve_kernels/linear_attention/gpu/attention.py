"""Linear attention on GPUs: the kernel, on states in a pool or of rows."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve_kernels.linear_attention.gpu.step import step
from jaxserve_kernels.linear_attention.states import PooledStates
from jaxserve_kernels.segments import Segments


def linear_attention(
    q: Float[Array, "T K H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T N V"],
    log_decay: Float[Array, "T N"],
    rate: Float[Array, "T N"] | None,
    states: Float[Array, "B N H V"] | PooledStates,
    segments: Segments,
) -> tuple[Float[Array, "T N V"], Float[Array, "B N H V"] | PooledStates]:
    """See `api.linear_attention`. Shapes have a kernel (`unsupported`)."""
    if isinstance(states, PooledStates):
        return _in_pool(q, k, v, log_decay, rate, states, segments)
    rows = jnp.arange(len(states), dtype=jnp.int32)
    out, after = _in_pool(q, k, v, log_decay, rate, PooledStates(states[None], jnp.int32(0), rows, rows), segments)
    return out, after.pool[0]


def _in_pool(
    q: Float[Array, "T K H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T N V"],
    log_decay: Float[Array, "T N"],
    rate: Float[Array, "T N"] | None,
    states: PooledStates,
    segments: Segments,
) -> tuple[Float[Array, "T N V"], PooledStates]:
    out, pool = step(
        q.astype(jnp.float32),
        k.astype(jnp.float32),
        v.astype(jnp.float32),
        jnp.exp(log_decay.astype(jnp.float32)),
        None if rate is None else rate.astype(jnp.float32),
        states,
        segments.starts,
        is_decode=segments.chunks is None,
    )
    is_real = jnp.arange(len(out)) < segments.starts[-1]
    return jnp.where(is_real[:, None, None], out, 0), states._replace(pool=pool)
