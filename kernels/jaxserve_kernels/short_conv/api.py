"""Public entry of the short convolution. Letters: B rows, T tokens, C channels, W taps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve_kernels.backend import NATIVE, Backend
from jaxserve_kernels.segments import Segments
from jaxserve_kernels.short_conv import cpu, reference
from jaxserve_kernels.states import PooledStates


def short_conv(
    x: Float[Array, "T C"],
    weight: Float[Array, "C W"],
    bias: Float[Array, "C"] | None,
    windows: Float[Array, "B W1 C"] | PooledStates,
    segments: Segments,
    *,
    sizes: Sequence[int] | None = None,
    is_silu: bool = False,
    backend: Backend = "reference",
) -> tuple[list[Float[Array, "T _"]], Float[Array, "B W1 C"] | PooledStates]:
    """Return, in float32, each token's sum over itself and the W - 1 tokens before it, and each row's last W - 1 inputs.

    The last tap is the token's own (a depthwise Conv1d with left padding). `windows` holds the inputs before a row's first
    token, the oldest first, or is a pool with them, which is DONATED and returned with the windows after. Every output adds the same
    numbers in the same order however its text was divided into steps.

    sizes: the numbers of channels of the arrays to be returned; None: one array. is_silu: sums, with the bias, go through SiLU.

    The native kernel takes float32. Outputs of padding tokens are finite.
    """
    sizes = [x.shape[1]] if sizes is None else sizes
    pooled = windows
    if backend in NATIVE and cpu.supports(x, weight, windows):
        if not isinstance(windows, PooledStates):
            rows = jnp.arange(len(windows), dtype=jnp.int32)
            pooled = PooledStates(windows[None], jnp.int32(0), rows, rows)
        assert isinstance(pooled, PooledStates), "windows in a pool"
        parts, after = cpu.short_conv(x, weight, bias, pooled, segments, sizes, is_silu=is_silu)
        return parts, after if isinstance(windows, PooledStates) else after.pool[0]
    out, last = reference.short_conv(
        x, weight, windows.read() if isinstance(windows, PooledStates) else windows, segments
    )
    out = out if bias is None else out + bias.astype(jnp.float32)
    out = jax.nn.silu(out) if is_silu else out
    parts = jnp.split(out, list(accumulate(sizes))[:-1], -1)
    return parts, windows.written(last) if isinstance(windows, PooledStates) else last
