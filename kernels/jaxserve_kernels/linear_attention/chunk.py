"""The part of a chunk that does not depend on the state before it: common to all backends.

Letters: C tokens of a chunk, K key heads, R value heads of a key head, H key dim, V value dim.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Float32 is multiplied as float32 on every device.
einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Tokens(NamedTuple):
    """Operands by key head K and value head R of a key head, in float32. A batch of rows, or the tokens of a chunk."""

    q: Float[Array, "X K H"]
    k: Float[Array, "X K H"]
    v: Float[Array, "X K R V"]
    log_decay: Float[Array, "X K R *H"]
    """One for a value head, or for each channel of its key."""
    rate: Float[Array, "X K R"] | None

    @classmethod
    def of(
        cls,
        q: Float[Array, "X K H"],
        k: Float[Array, "X K H"],
        v: Float[Array, "X N V"],
        log_decay: Float[Array, "X N *H"],
        rate: Float[Array, "X N"] | None,
    ) -> Tokens:
        """Return the operands of `api.linear_attention`."""

        def grouped(x: Array) -> Array:
            return x.astype(jnp.float32).reshape(*k.shape[:2], -1, *x.shape[2:])

        wide = q.astype(jnp.float32), k.astype(jnp.float32)
        return cls(*wide, grouped(v), grouped(log_decay), None if rate is None else grouped(rate))


class Chunk(NamedTuple):
    """Factors of one chunk, with which it needs the state before in matmuls only (arXiv 2412.06464, 3.3; 2405.21060, 6).

    From the state S before, token i adds u_i to what its key finds: u = solution (v - from_start k S), or v without rates. It
    reads from_start_i q_i S + the sum of scores_ij u_j, and the state after is from_start_C S + the sum of kept_j k_j u_j^T.
    """

    solution: Float[Array, "K R C C"] | None
    """None without rates."""
    scores: Float[Array, "K R C C"]
    from_start: Float[Array, "K R C"]
    """Decay from the start of the chunk up to and with token i."""
    kept: Float[Array, "K R C"]
    """Decay from after token j up to the end of the chunk."""


def within(tokens: Tokens) -> Chunk:
    """Return the factors of one chunk."""
    q, k, _, log_decay, rate = tokens
    size = len(q)
    is_seen = jnp.tril(jnp.ones((size, size), bool))
    # Sums of each span, not differences of sums from the start, which would cancel.
    spans = einsum("is,skr,sj->krij", is_seen.astype(jnp.float32), log_decay, jnp.tril(jnp.ones((size, size)), -1))
    decay = jnp.where(is_seen, jnp.exp(spans), 0)  # (K, R, C, C): from after token j up to token i
    from_start = jnp.exp(einsum("is,skr->kri", is_seen.astype(jnp.float32), log_decay))  # (K, R, C)
    scores = decay * einsum("ikh,jkh->kij", q, k)[:, None]
    solution = None
    if rate is not None:
        own_rate = rate.transpose(1, 2, 0)  # (K, R, C)
        system = own_rate[..., None] * decay * einsum("ikh,jkh->kij", k, k)[:, None]
        solution = inverse(system) * own_rate[..., None, :]
    return Chunk(solution, scores, from_start, decay[:, :, -1])


def inverse(system: Float[Array, "*heads C C"]) -> Float[Array, "*heads C C"]:
    """Return the inverse of I + the strictly lower part of `system`, by inverting blocks of 1, 2, 4, ... on the diagonal.

    Powers of the matrix, the other form without a loop over tokens, would cancel where keys are alike.
    """
    heads, count = system.shape[:-2], system.shape[-1]
    inverse = jnp.ones((*heads, count, 1, 1), jnp.float32)
    size = 1
    while size < count:
        pairs = count // (2 * size)
        blocks = system.reshape(*heads, pairs, 2, size, pairs, 2, size)[..., 1, :, :, 0, :]
        lower = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)  # (*heads, pairs, size, size)
        first, second = (inverse.reshape(*heads, pairs, 2, size, size)[..., part, :, :] for part in (0, 1))
        corner = -einsum("...ij,...jk,...kl->...il", second, lower, first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], -1)], -2)
        size *= 2
    return inverse[..., 0, :, :]
