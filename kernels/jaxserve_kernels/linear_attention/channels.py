"""A chunk of tokens whose decays differ by channel of the key (Kimi delta attention, arXiv 2510.26692).

Letters: C tokens of a chunk, K key heads, R value heads of a key head, H key dim, V value dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve_kernels.linear_attention.chunk import Tokens, einsum, inverse


def chunk_by_channel(tokens: Tokens, state: Float[Array, "K R H V"]) -> tuple[Array, Array]:
    """Return what the tokens of one chunk read, (C, K, R, V), and the state after it; tokens after its end are zero and change nothing.

    As for decays by head (`chunk.Chunk`), but the decay between two tokens is a factor on each channel of their keys.
    """
    q, k, v, log_decay, rate = tokens
    size = len(q)
    is_seen = jnp.tril(jnp.ones((size, size), bool))[..., None, None, None]
    is_between = jnp.tril(is_seen[..., 0, 0, 0], -1)[..., None, None, None]
    # Sums of each span, not differences of sums from the start, which would cancel.
    spans = jax.lax.cumsum(jnp.where(is_between, log_decay[:, None], 0), axis=0)
    decay = jnp.where(is_seen, jnp.exp(spans), 0)  # (C, C, K, R, H): from after token j up to token i
    from_start = jnp.exp(jax.lax.cumsum(log_decay, axis=0))  # (C, K, R, H)
    scores = jnp.sum(q[:, None, :, None] * k[None, :, :, None] * decay, -1)  # (C, C, K, R)
    keys = from_start * k[:, :, None]
    added = v
    if rate is not None:
        system = rate[:, None] * jnp.sum(k[:, None, :, None] * k[None, :, :, None] * decay, -1)
        known = einsum("ikrh,krhv->ikrv", keys, state)
        solution = inverse(jnp.moveaxis(system, (0, 1), (2, 3)))
        added = einsum("krij,jkr,jkrv->ikrv", solution, rate, v - known)
    out = einsum("ijkr,jkrv->ikrv", scores, added)
    out += einsum("ikrh,krhv->ikrv", from_start * q[:, :, None], state)
    after = state * from_start[-1][..., None]
    return out, after + einsum("jkrh,jkrv->krhv", decay[-1] * k[:, :, None], added)
