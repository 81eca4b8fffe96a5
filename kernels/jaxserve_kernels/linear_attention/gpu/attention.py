"""Linear attention on GPUs: rows with one token by the kernel, rows in chunks by XLA."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve_kernels.linear_attention import reference
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
    num_rows, num_slots = len(states.reads), states.pool.shape[1]
    is_single = reference.single_rows(segments)

    def first(x: Array) -> Array:
        """Return the numbers of as many tokens as there are rows: those of rows with one token are in their order."""
        return x[:num_rows].astype(jnp.float32)

    out, pool = step(
        first(q),
        first(k),
        first(v),
        jnp.exp(first(log_decay)),
        None if rate is None else first(rate),
        states._replace(reads=jnp.where(is_single, states.reads, -1)),
    )
    states = states._replace(pool=pool)
    if segments.chunks is None:
        return out, states
    out, after = reference.chunked(q, k, v, log_decay, rate, out, states.read(), segments)
    others = states._replace(writes=jnp.where(is_single, num_slots, states.writes))
    return out, others.written(after)._replace(writes=states.writes)
