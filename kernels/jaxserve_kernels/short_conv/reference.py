"""short_conv in jax.numpy: one gather of a token per tap."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve_kernels.segments import Segments


def short_conv(
    x: Float[Array, "T C"],
    weight: Float[Array, "C W"],
    windows: Float[Array, "B W1 C"],
    segments: Segments,
) -> tuple[Float[Array, "T C"], Float[Array, "B W1 C"]]:
    """See `api.short_conv`."""
    num_tokens, (num_rows, num_kept, channels) = len(x), windows.shape
    inputs = jnp.concatenate([x.astype(jnp.float32), windows.astype(jnp.float32).reshape(-1, channels)])
    starts, counts = segments.starts[:-1], segments.starts[1:] - segments.starts[:-1]

    def place(rows: Array, offsets: Array) -> Array:
        """Return the index of the input `offsets` tokens after each row's first; negative offsets are in its window."""
        return jnp.where(offsets >= 0, starts[rows] + offsets, num_tokens + (rows + 1) * num_kept + offsets)

    taps = weight.astype(jnp.float32)
    offsets = jnp.arange(num_tokens) - starts[segments.rows]
    out = jnp.zeros((num_tokens, channels), jnp.float32)
    for tap in range(num_kept + 1):
        out += inputs[place(segments.rows, offsets - num_kept + tap)] * taps[:, tap]
    rows = jnp.arange(num_rows)[:, None]
    return out, inputs[place(rows, counts[:, None] - num_kept + jnp.arange(num_kept))]
