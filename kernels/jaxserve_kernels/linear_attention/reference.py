"""linear_attention in jax.numpy: one token of every row at once, and a loop over the chunks of longer rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve_kernels.linear_attention.channels import chunk_by_channel
from jaxserve_kernels.linear_attention.chunk import Tokens, einsum, within
from jaxserve_kernels.segments import CHUNK, Segments


def linear_attention(
    q: Float[Array, "T K H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T N V"],
    log_decay: Float[Array, "T N *H"],
    rate: Float[Array, "T N"] | None,
    states: Float[Array, "B N H V"],
    segments: Segments,
) -> tuple[Float[Array, "T N V"], Float[Array, "B N H V"]]:
    """See `api.linear_attention`."""
    num_tokens, num_rows, num_key_heads = len(q), len(states), q.shape[1]
    tokens = Tokens.of(q, k, v, log_decay, rate)
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


def _single(tokens: Tokens, state: Float[Array, "B K R H V"]) -> tuple[Array, Array]:
    """Compute one token of each row."""
    state = state * _by_row(jnp.exp(tokens.log_decay))
    added = tokens.v
    if tokens.rate is not None:
        known = einsum("bkh,bkrhv->bkrv", tokens.k, state)
        added = tokens.rate[..., None] * (tokens.v - known)
    state = state + tokens.k[:, :, None, :, None] * added[..., None, :]
    return einsum("bkh,bkrhv->bkrv", tokens.q, state), state


def _by_row(decay: Float[Array, "B K R *H"]) -> Float[Array, "B K R _ 1"]:
    """Return the factor on each row of a state."""
    return decay[..., None] if decay.ndim == 4 else decay[..., None, None]


def _chunked(
    tokens: Tokens, out: Float[Array, "T2 K R V"], states: Float[Array, "B K R H V"], segments: Segments
) -> tuple[Array, Array]:
    """Compute the rows after the decode rows, chunk by chunk. A chunk's results after its last token are overwritten by
    the next chunk."""
    chunks = segments.chunks
    assert chunks is not None
    compute = _chunk if tokens.log_decay.ndim == 3 else chunk_by_channel
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
        made, state = compute(own, states[row])
        out = jax.lax.dynamic_update_slice_in_dim(out, made, start, 0)
        return out, jax.lax.dynamic_update_index_in_dim(states, state, row, 0)

    found: tuple[Array, Array] = jax.lax.fori_loop(0, chunks.num_chunks, one, (out, states))
    return found


def _chunk(tokens: Tokens, state: Float[Array, "K R H V"]) -> tuple[Array, Array]:
    """Compute the tokens of one chunk; those after its end are zero and change nothing (arXiv 2412.06464, 3.3)."""
    chunk = within(tokens)
    from_start = chunk.from_start[..., None]  # (K, R, C, 1)
    added = tokens.v.transpose(1, 2, 0, 3)  # (K, R, C, V)
    if chunk.solution is not None:
        known = from_start * einsum("ikh,krhv->kriv", tokens.k, state)
        added = einsum("krij,krjv->kriv", chunk.solution, added - known)
    out = einsum("krij,krjv->ikrv", chunk.scores, added)
    out += from_start.transpose(2, 0, 1, 3) * einsum("ikh,krhv->ikrv", tokens.q, state)
    after = state * from_start[:, :, -1, :, None]
    return out, after + einsum("jkh,krj,krjv->krhv", tokens.k, chunk.kept, added)
