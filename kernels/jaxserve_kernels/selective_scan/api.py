"""Public entry of the selective scan. Letters: B rows, T tokens, C channels, N numbers of a channel's state."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve_kernels.backend import NATIVE, Backend
from jaxserve_kernels.segments import Segments, decode_segments
from jaxserve_kernels.selective_scan import reference
from jaxserve_kernels.selective_scan.reference import Scanned
from jaxserve_kernels.states import PooledStates


def selective_scan(
    tokens: Scanned,
    rates: Float[Array, "N C"],
    states: Float[Array, "B N C"] | PooledStates,
    segments: Segments,
    *,
    backend: Backend = "reference",
) -> tuple[Float[Array, "T C"], Float[Array, "B N C"] | PooledStates]:
    """Return every token's output and each row's state after its last token, in float32.

    rates: the logarithm of the decay in a step of 1, below 0. states: the states before, `[B, N, C]`, or a pool with them, which is
    DONATED and returned with the states after.

    A token multiplies its row's state h by exp(step * rate), adds step * x * b to it, and reads the sum of c * h over N
    (arXiv 2312.00752, algorithm 2).

    Rows with one token that lead a step, and all rows of a decode program, are computed at once. Others go through a loop over
    chunks of `segments.CHUNK` tokens, with memory for the states of one chunk at a time: with native kernels, on CPUs, token by token,
    elsewhere by an associative scan. Steps that end at multiples of CHUNK give the same bits as one step; others differ by float32 rounding.

    A row's result does not depend on other rows nor on padding. Rows without tokens keep their state. Outputs of padding tokens are
    finite.
    """
    in_turn = backend in NATIVE
    if isinstance(states, PooledStates):
        if segments.chunks is None and len(states.reads) == 1:
            return _with_second_row(tokens, rates, states, segments, backend)
        out, after = reference.selective_scan(tokens, rates, states.read(), segments, in_turn=in_turn)
        return out, states.written(after)
    return reference.selective_scan(tokens, rates, states, segments, in_turn=in_turn)


def _with_second_row(
    tokens: Scanned, rates: Float[Array, "N C"], states: PooledStates, segments: Segments, backend: Backend
) -> tuple[Float[Array, "1 C"], PooledStates]:
    """Scan the only row of a step with one without tokens beside it.

    XLA:CPU makes a slice of a gather of one row, computes the state for its sums and for the pool apart, and copies the pool in
    between.
    """
    two = Scanned(*(jnp.concatenate([each, each]) for each in tokens))
    reads, writes = jnp.concatenate([states.reads, states.reads]), states.writes
    dropped = jnp.full_like(states.reads, states.pool.shape[1])
    pooled = states._replace(reads=reads, writes=None if writes is None else jnp.concatenate([writes, dropped]))
    starts = jnp.concatenate([segments.starts, segments.starts[-1:]])
    out, after = selective_scan(two, rates, pooled, decode_segments(starts), backend=backend)
    assert isinstance(after, PooledStates), "states in a pool"
    return out[:1], after._replace(reads=states.reads, writes=writes)
