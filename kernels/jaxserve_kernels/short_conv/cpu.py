"""short_conv by the native kernel, which updates windows in their pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve_kernels import native
from jaxserve_kernels.segments import Segments
from jaxserve_kernels.states import PooledStates

_TARGET: Final = "jaxserve_short_conv"
_MOST_TAPS: Final = 8


def supports(x: jax.Array, weight: jax.Array, windows: jax.Array | PooledStates) -> bool:
    """Return True if the kernel computes this convolution."""
    kept = windows.pool if isinstance(windows, PooledStates) else windows
    has_types = x.dtype == kept.dtype == jnp.float32
    return has_types and weight.shape[1] <= _MOST_TAPS and native.has(_TARGET)


def short_conv(
    x: Float[Array, "T C"],
    weight: Float[Array, "C W"],
    bias: Float[Array, "C"] | None,
    windows: PooledStates,
    segments: Segments,
    sizes: Sequence[int],
    *,
    is_silu: bool,
) -> tuple[list[Float[Array, "T _"]], PooledStates]:
    """See `api.short_conv`; padding becomes zeros."""
    bias = jnp.zeros(0) if bias is None else bias
    places = [jnp.asarray(each, jnp.int32) for each in (segments.starts, windows.reads, windows.layer)]
    operands = [x, weight.astype(jnp.float32), bias.astype(jnp.float32), *places, windows.pool]
    results = [jax.ShapeDtypeStruct((len(x), size), jnp.float32) for size in sizes]
    aliases: dict[int, int] = {}
    if windows.writes is not None:
        aliases = {len(operands) - 1: 0}
        operands.append(windows.writes.astype(jnp.int32))
        results = [jax.ShapeDtypeStruct(windows.pool.shape, jnp.float32), *results]
    call = jax.ffi.ffi_call(_TARGET, results, input_output_aliases=aliases)
    made = call(*operands, is_decode=segments.chunks is None, is_silu=is_silu)
    if windows.writes is None:
        return list(made), windows
    pool, *parts = made
    return parts, windows._replace(pool=pool)
