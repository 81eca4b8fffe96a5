"""Linear attention on GPUs: both kernels, on states in a pool."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve_kernels.linear_attention.chunk import Tokens
from jaxserve_kernels.linear_attention.gpu import takes_chunks
from jaxserve_kernels.linear_attention.gpu.chunks import chunked_step, chunks_of
from jaxserve_kernels.linear_attention.gpu.step import step
from jaxserve_kernels.segments import Segments
from jaxserve_kernels.states import PooledStates


def linear_attention(
    q: Float[Array, "T K H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T N V"],
    log_decay: Float[Array, "T N"],
    rate: Float[Array, "T N"] | None,
    states: PooledStates,
    segments: Segments,
) -> tuple[Float[Array, "T N V"], PooledStates]:
    """See `api.linear_attention`. Shapes have a kernel (`unsupported`)."""
    operands = (
        q.astype(jnp.float32),
        k.astype(jnp.float32),
        v.astype(jnp.float32),
        jnp.exp(log_decay.astype(jnp.float32)),
        None if rate is None else rate.astype(jnp.float32),
    )
    starts, ends, whole = segments.starts[:-1], segments.starts[1:], segments.whole
    if whole is None or not takes_chunks(q.shape[2], v.shape[2], len(q)):
        out, pool = step(*operands, states, starts, ends, is_decode=segments.chunks is None)
    else:
        has_chunks = whole.counts > 0
        out, pool = step(*operands, states, starts, jnp.where(has_chunks, starts, ends), is_decode=False)
        chunks = chunks_of(Tokens.of(q, k, v, log_decay, rate), whole)
        in_chunks, pool = chunked_step(*operands, chunks, states._replace(pool=pool), segments.starts, whole)
        out = jnp.where(has_chunks[segments.rows][:, None, None], in_chunks, out)
    is_real = jnp.arange(len(out)) < segments.starts[-1]
    return jnp.where(is_real[:, None, None], out, 0), states._replace(pool=pool)
