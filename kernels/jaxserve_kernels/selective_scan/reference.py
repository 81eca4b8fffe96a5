"""selective_scan in jax.numpy: one token of every row at once, and a loop over the chunks of longer rows."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve_kernels.segments import CHUNK, Segments


class Scanned(NamedTuple):
    """The operands of a scan for each token."""

    x: Float[Array, "T C"]
    steps: Float[Array, "T C"]
    """At least 0."""
    b: Float[Array, "T N"]
    c: Float[Array, "T N"]


def selective_scan(
    tokens: Scanned,
    rates: Float[Array, "N C"],
    states: Float[Array, "B N C"],
    segments: Segments,
    *,
    in_turn: bool = False,
) -> tuple[Float[Array, "T C"], Float[Array, "B N C"]]:
    """See `api.selective_scan`. in_turn: the tokens of a chunk are computed one after the other."""
    tokens = Scanned(*(each.astype(jnp.float32) for each in tokens))
    num_tokens, num_rows, chunks = len(tokens.x), len(states), segments.chunks
    is_single = segments.starts[1:] > segments.starts[:-1]
    if chunks is not None:
        is_single &= jnp.arange(num_rows) < chunks.num_decode_rows
    first = Scanned(*(each[:num_rows] for each in tokens))
    after = jnp.where(is_single[:, None, None], _decay(first, rates) * states + _added(first), states)
    out = (_matmul if in_turn else _read)(first, after)
    if chunks is not None:
        out = jnp.pad(out, ((0, num_tokens + CHUNK - num_rows), (0, 0)))
        out, after = _chunked(tokens, rates, out, after, segments, in_turn=in_turn)
    return out[:num_tokens], after


def _decay(tokens: Scanned, rates: Float[Array, "N C"]) -> Float[Array, "X N C"]:
    """Return the factors on the states."""
    return jnp.exp(tokens.steps[:, None] * rates)


def _added(tokens: Scanned) -> Float[Array, "X N C"]:
    """Return what the tokens add to the states."""
    return tokens.b[:, :, None] * (tokens.steps * tokens.x)[:, None]


def _read(tokens: Scanned, states: Float[Array, "X N C"]) -> Float[Array, "X C"]:
    return jnp.sum(tokens.c[:, :, None] * states, 1)


def _matmul(tokens: Scanned, states: Float[Array, "X N C"]) -> Float[Array, "X C"]:
    """Return what `_read` returns. In a sum XLA:CPU would compute the state of each number again, three to seven times as long."""
    return jnp.einsum("xn,xnc->xc", tokens.c, states, precision=jax.lax.Precision.HIGHEST)


def _chunked(
    tokens: Scanned,
    rates: Float[Array, "N C"],
    out: Float[Array, "T2 C"],
    states: Float[Array, "B N C"],
    segments: Segments,
    *,
    in_turn: bool,
) -> tuple[Array, Array]:
    """Compute the rows after the decode rows, chunk by chunk. A chunk's results after its last token are overwritten by
    the next chunk."""
    chunks, compute = segments.chunks, _in_turn if in_turn else _at_once
    assert chunks is not None
    padded = Scanned(*(jnp.pad(each, ((0, CHUNK), (0, 0))) for each in tokens))

    def one(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, states = carry
        row, start = chunks.rows[index], chunks.starts[index]
        is_own = jnp.arange(CHUNK)[:, None] < chunks.sizes[index]
        own = Scanned(*(jnp.where(is_own, jax.lax.dynamic_slice_in_dim(x, start, CHUNK), 0) for x in padded))
        made, state = compute(own, rates, states[row])
        out = jax.lax.dynamic_update_slice_in_dim(out, made, start, 0)
        return out, jax.lax.dynamic_update_index_in_dim(states, state, row, 0)

    found: tuple[Array, Array] = jax.lax.fori_loop(0, chunks.num_chunks, one, (out, states))
    return found


def _at_once(tokens: Scanned, rates: Float[Array, "N C"], state: Float[Array, "N C"]) -> tuple[Array, Array]:
    """Return what the tokens of a chunk read, and the state after it. Tokens after its end have steps of 0, and change nothing."""
    added = _added(tokens)
    decay = _decay(tokens, rates)
    added = added.at[0].add(decay[0] * state)

    def after(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    _, states = jax.lax.associative_scan(after, (decay, added))
    return _read(tokens, states), states[-1]


def _in_turn(tokens: Scanned, rates: Float[Array, "N C"], state: Float[Array, "N C"]) -> tuple[Array, Array]:
    """Return what `_at_once` returns, with memory for one state."""

    def one(state: Array, token: Scanned) -> tuple[Array, Array]:
        step = token.steps
        state = jnp.exp(step * rates) * state + token.b[:, None] * (step * token.x)
        state = jax.lax.optimization_barrier(state)
        return state, jnp.matmul(token.c, state, precision=jax.lax.Precision.HIGHEST)

    after, out = jax.lax.scan(one, state, tokens)
    return out, after
