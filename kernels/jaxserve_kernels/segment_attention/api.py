"""Public entry of segment attention. Letters: T tokens, Q of them that attend, N heads, H head dim."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve_kernels.backend import NATIVE, Backend
from jaxserve_kernels.segment_attention import cpu, reference

__all__ = ["attend_segments", "has_kernel"]


def has_kernel(backend: Backend) -> bool:
    """Return True if the backend has a kernel for segments; it takes heads of any dimension."""
    return backend in NATIVE and cpu.is_built()


def attend_segments(
    query: Float[Array, "Q N H"],
    key: Float[Array, "T N H"],
    value: Float[Array, "T N H"],
    numbers: Int[Array, "T"],
    num_tokens: Int[Array, ""],
    first: Int[Array, ""] | None = None,
    *,
    scale: float,
    longest: int,
    window: int | None = None,
    bias: Float[Array, "N R"] | None = None,
    backend: Backend = "reference",
) -> Float[Array, "Q N H"]:
    """Return softmax(q k * scale) v of Q neighbouring tokens, each with all tokens of its segment; scores and their sums are float32.

    numbers: neighbours of the same number are a segment; each segment has its own. num_tokens: tokens after these are padding,
    whose results have no meaning. first: the token of the first query; None: 0. The last one has keys as well. longest: tokens of the longest segment without padding, which bounds what the reference
    computes. window: a token attends to those of its segment that are fewer tokens away than these, on both sides; None: to all. bias: a number for
    each head and each distance of a key after its query, from 1 - longest to longest - 1, that is added to scores. The native kernel computes no padding, and gives a token the same bits wherever its segment lies.
    """
    first = jnp.int32(0) if first is None else first
    window = None if window is None or window >= longest else window
    given = query, key, value, numbers, num_tokens, first
    if has_kernel(backend):
        return cpu.attend_segments(*given, scale=scale, window=window, bias=bias)
    return reference.attend_segments(*given, scale=scale, longest=longest, window=window, bias=bias)
