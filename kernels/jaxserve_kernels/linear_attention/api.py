"""Public entry of linear attention. Letters: B rows, T tokens, K key heads, N value heads, H key dim, V value dim."""

from __future__ import annotations

from jaxtyping import Array, Float

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.linear_attention import gpu, reference
from jaxserve_kernels.linear_attention.states import PooledStates
from jaxserve_kernels.segments import Segments


def takes_tokens_in_turn(backend: Backend, key_dim: int, value_dim: int) -> bool:
    """Return whether the tokens of rows without whole chunks take the recurrent form, so that they give the bits of decode steps."""
    return backend in gpu.BACKENDS and gpu.unsupported(key_dim, value_dim) is None


def linear_attention(
    q: Float[Array, "T K H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T N V"],
    log_decay: Float[Array, "T N *H"],
    rate: Float[Array, "T N"] | None,
    states: Float[Array, "B N H V"] | PooledStates,
    segments: Segments,
    *,
    backend: Backend = "reference",
) -> tuple[Float[Array, "T N V"], Float[Array, "B N H V"] | PooledStates]:
    """Return every token's output and each row's state after its last token, in float32.

    states: the states before, `[B, N, H, V]`, or a pool with them, which is DONATED and returned with the states after.

    A token multiplies its row's state S by exp(log_decay), adds k u^T to it, and reads S^T q. Without `rate` u is v
    (Mamba-2's form, arXiv 2405.21060: q, k, v are C, B, dt x); with `rate` it is rate * (v - S^T k), the gated delta rule
    (arXiv 2412.06464). Each key head serves N / K consecutive value heads. log_decay is at most 0. It is one number for a head, or
    one for each channel of its key, which multiplies a row of S (Kimi delta attention, arXiv 2510.26692).

    In the reference, rows with one token that lead a step, and all rows of a decode program, take the recurrent form; the others
    take the chunked form of `segments.CHUNK` tokens. Steps that end at multiples of CHUNK give the same bits as one step; others
    differ by float32 rounding.

    On GPUs, whole chunks take the chunked form if the step has `gpu.FEWEST_TOKENS` tokens or more, and all other tokens the
    recurrent one; decays by channel have no kernel there. Without whole chunks (`Segments.without_whole_chunks`), steps that end anywhere give the same bits.

    A row's result does not depend on other rows nor on padding. Rows without tokens keep their state. Outputs of padding tokens are finite.
    """
    operands = (q, k, v, log_decay, rate)
    if log_decay.ndim == 2 and takes_tokens_in_turn(backend, q.shape[2], v.shape[2]):
        from jaxserve_kernels.linear_attention.gpu import attention  # imports Pallas

        return attention.linear_attention(*operands, states, segments)
    if isinstance(states, PooledStates):
        out, after = reference.linear_attention(*operands, states.read(), segments)
        return out, states.written(after)
    return reference.linear_attention(*operands, states, segments)
