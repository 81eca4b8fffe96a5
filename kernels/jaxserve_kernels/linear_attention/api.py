"""Public entry of linear attention. Letters: B rows, T tokens, K key heads, N value heads, H key dim, V value dim."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve_kernels.backend import NATIVE, Backend
from jaxserve_kernels.linear_attention import cpu, gpu, reference
from jaxserve_kernels.segments import Segments
from jaxserve_kernels.states import PooledStates


def takes_tokens_in_turn(backend: Backend, key_dim: int, value_dim: int, *, is_by_channel: bool = False) -> bool:
    """Return whether the tokens of rows without whole chunks take the recurrent form, so that they give the bits of decode steps.

    is_by_channel: decays differ by channel of the key.
    """
    if backend in NATIVE:
        return cpu.is_built()
    return not is_by_channel and backend in gpu.BACKENDS and gpu.unsupported(key_dim, value_dim) is None


def linear_attention(
    q: Float[Array, "T K H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T N V"],
    log_decay: Float[Array, "T N *H"],
    rate: Float[Array, "T N"] | None,
    states: Float[Array, "B N H V"] | PooledStates,
    segments: Segments,
    *,
    norm_eps: float | None = None,
    backend: Backend = "reference",
) -> tuple[Float[Array, "T N V"], Float[Array, "B N H V"] | PooledStates]:
    """Return every token's output and each row's state after its last token, in float32.

    states: the states before, `[B, N, H, V]`, or a pool with them, which is DONATED and returned with the states after.

    A token multiplies its row's state S by exp(log_decay), adds k u^T to it, and reads S^T q. Without `rate` u is v
    (Mamba-2's form, arXiv 2405.21060: q, k, v are C, B, dt x); with `rate` it is rate * (v - S^T k), the gated delta rule
    (arXiv 2412.06464). With `norm_eps`, queries and keys are divided by their lengths first, the root of `norm_eps` and the sum of
    squares, and queries also by the root of H. Each key head serves N / K consecutive value heads. log_decay is at most 0. It is one number for a head, or
    one for each channel of its key, which multiplies a row of S (Kimi delta attention, arXiv 2510.26692).

    In the reference, rows with one token that lead a step, and all rows of a decode program, take the recurrent form; the others
    take the chunked form of `segments.CHUNK` tokens. Steps that end at multiples of CHUNK give the same bits as one step; others
    differ by float32 rounding.

    On GPUs, whole chunks take the chunked form if the step has `gpu.FEWEST_TOKENS` tokens or more, and all other tokens the
    recurrent one; decays by channel have no kernel there. Without whole chunks (`Segments.without_whole_chunks`), steps that end anywhere give the same bits.

    The native kernel for CPUs takes every token in turn, and its sums of squares have one order, so steps that end anywhere give the
    same bits. Elsewhere XLA computes lengths, and adds up the squares of few tokens in another order.

    A row's result does not depend on other rows nor on padding. Rows without tokens keep their state. Outputs of padding tokens are finite.
    """
    is_native = backend in NATIVE and cpu.is_built()
    if norm_eps is not None and not is_native:
        q, k = _unit(q, norm_eps) * q.shape[2] ** -0.5, _unit(k, norm_eps)
    operands = (q, k, v, log_decay, rate)
    if takes_tokens_in_turn(backend, q.shape[2], v.shape[2], is_by_channel=log_decay.ndim == 3):
        if isinstance(states, PooledStates):
            return _in_turn(*operands, states, segments, norm_eps, backend)
        rows = jnp.arange(len(states), dtype=jnp.int32)
        pooled = PooledStates(states[None], jnp.int32(0), rows, rows)
        out, pooled = _in_turn(*operands, pooled, segments, norm_eps, backend)
        return out, pooled.pool[0]
    if isinstance(states, PooledStates):
        out, after = reference.linear_attention(*operands, states.read(), segments)
        return out, states.written(after)
    return reference.linear_attention(*operands, states, segments)


def _in_turn(
    q: Float[Array, "T K H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T N V"],
    log_decay: Float[Array, "T N *H"],
    rate: Float[Array, "T N"] | None,
    states: PooledStates,
    segments: Segments,
    norm_eps: float | None,
    backend: Backend,
) -> tuple[Float[Array, "T N V"], PooledStates]:
    """Attend by a kernel of the backend."""
    operands = (q, k, v, log_decay, rate, states, segments)
    if backend in NATIVE:
        return cpu.linear_attention(*operands, norm_eps)
    from jaxserve_kernels.linear_attention.gpu import attention  # imports Pallas

    return attention.linear_attention(*operands)


def _unit(x: Float[Array, "T K H"], eps: float) -> Float[Array, "T K H"]:
    """Return x over the length of its last axis, in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, -1, keepdims=True) + eps)
