"""linear_attention in jax.numpy: one token of every row at once, and a loop over the chunks of longer rows."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxserve_kernels.segments import CHUNK, Segments

# Float32 is multiplied as float32 on every device.
_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class _Tokens(NamedTuple):
    """Operands by key head K and value head R of a key head, in float32. A batch of rows, or the tokens of a chunk."""

    q: Float[Array, "X K H"]
    k: Float[Array, "X K H"]
    v: Float[Array, "X K R V"]
    log_decay: Float[Array, "X K R"]
    rate: Float[Array, "X K R"] | None


def linear_attention(
    q: Float[Array, "T K H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T N V"],
    log_decay: Float[Array, "T N"],
    rate: Float[Array, "T N"] | None,
    states: Float[Array, "B N H V"],
    segments: Segments,
) -> tuple[Float[Array, "T N V"], Float[Array, "B N H V"]]:
    """See `api.linear_attention`."""
    num_tokens, num_rows, num_key_heads = len(q), len(states), q.shape[1]

    def grouped(x: Array) -> Array:
        return x.astype(jnp.float32).reshape(num_tokens, num_key_heads, -1, *x.shape[2:])

    tokens = _Tokens(
        q.astype(jnp.float32),
        k.astype(jnp.float32),
        grouped(v),
        grouped(log_decay),
        None if rate is None else grouped(rate),
    )
    before = states.reshape(num_rows, num_key_heads, -1, *states.shape[2:])  # (B, K, R, H, V)
    chunks = segments.chunks
    is_single = segments.starts[1:] > segments.starts[:-1]
    if chunks is not None:
        is_single &= jnp.arange(num_rows) < chunks.num_decode_rows
    first = jax.tree.map(lambda x: x[:num_rows], tokens)
    out, after = _single(first, before)
    after = jnp.where(is_single[:, None, None, None, None], after, before)
    if chunks is not None:
        out = jnp.pad(out, ((0, num_tokens + CHUNK - num_rows), *[(0, 0)] * 3))
        out, after = _chunked(tokens, out, after, segments)
    return out[:num_tokens].reshape(v.shape), after.reshape(states.shape)


def _single(tokens: _Tokens, state: Float[Array, "B K R H V"]) -> tuple[Array, Array]:
    """Compute one token of each row."""
    state = state * jnp.exp(tokens.log_decay)[..., None, None]
    added = tokens.v
    if tokens.rate is not None:
        known = _einsum("bkh,bkrhv->bkrv", tokens.k, state)
        added = tokens.rate[..., None] * (tokens.v - known)
    state = state + tokens.k[:, :, None, :, None] * added[..., None, :]
    return _einsum("bkh,bkrhv->bkrv", tokens.q, state), state


def _chunked(
    tokens: _Tokens, out: Float[Array, "T2 K R V"], states: Float[Array, "B K R H V"], segments: Segments
) -> tuple[Array, Array]:
    """Compute the rows after the decode rows, chunk by chunk. A chunk's results after its last token are overwritten by
    the next chunk."""
    chunks = segments.chunks
    assert chunks is not None
    padded = jax.tree.map(lambda x: jnp.pad(x, ((0, CHUNK), *[(0, 0)] * (x.ndim - 1))), tokens)

    def one(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, states = carry
        row, start = chunks.rows[index], chunks.starts[index]
        is_own = jnp.arange(CHUNK) < chunks.sizes[index]
        own = jax.tree.map(
            lambda x: jnp.where(
                is_own.reshape(-1, *[1] * (x.ndim - 1)), jax.lax.dynamic_slice_in_dim(x, start, CHUNK), 0
            ),
            padded,
        )
        made, state = _chunk(own, states[row])
        out = jax.lax.dynamic_update_slice_in_dim(out, made, start, 0)
        return out, jax.lax.dynamic_update_index_in_dim(states, state, row, 0)

    found: tuple[Array, Array] = jax.lax.fori_loop(0, chunks.num_chunks, one, (out, states))
    return found


def _chunk(tokens: _Tokens, state: Float[Array, "K R H V"]) -> tuple[Array, Array]:
    """Compute the tokens of one chunk; those after its end are zero and change nothing (arXiv 2412.06464, 3.3)."""
    q, k, v, log_decay, rate = tokens
    size = len(q)
    is_seen = jnp.tril(jnp.ones((size, size), bool))
    # Sums of each span, not differences of sums from the start, which would cancel.
    spans = _einsum("is,skr,sj->krij", is_seen.astype(jnp.float32), log_decay, jnp.tril(jnp.ones((size, size)), -1))
    decay = jnp.where(is_seen, jnp.exp(spans), 0)  # (K, R, C, C): from after token j up to token i
    from_start = jnp.exp(_einsum("is,skr->kri", is_seen.astype(jnp.float32), log_decay))  # (K, R, C)
    added = v.transpose(1, 2, 0, 3)  # (K, R, C, V)
    if rate is not None:
        own_rate = rate.transpose(1, 2, 0)[..., None]  # (K, R, C, 1)
        known = from_start[..., None] * _einsum("ikh,krhv->kriv", k, state)
        system = own_rate * decay * _einsum("ikh,jkh->kij", k, k)[:, None]
        added = _einsum("krij,krjv->kriv", _inverse(system, is_seen), own_rate * (added - known))
    scores = decay * _einsum("ikh,jkh->kij", q, k)[:, None]
    out = _einsum("krij,krjv->ikrv", scores, added)
    out += from_start.transpose(2, 0, 1)[..., None] * _einsum("ikh,krhv->ikrv", q, state)
    kept = decay[:, :, -1]  # (K, R, C)
    after = state * from_start[:, :, -1, None, None]
    return out, after + _einsum("jkh,krj,krjv->krhv", k, kept, added)


def _inverse(system: Float[Array, "*heads C C"], is_seen: Bool[Array, "C C"]) -> Float[Array, "*heads C C"]:
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
        corner = -_einsum("...ij,...jk,...kl->...il", second, lower, first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], -1)], -2)
        size *= 2
    return inverse[..., 0, :, :]
