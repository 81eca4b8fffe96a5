"""Joins the results of parts of a row by XLA: the sums of a softmax cut in pieces (flash-decoding).

For heads that `join_kernel` does not take. Letters: B rows, U parts, P parts of the longest row, K KV heads, G query heads of a KV head, N = K * G, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve_kernels.paged_attention.gpu.splits import Parts
from jaxserve_kernels.paged_attention.gpu.tiles import LEAST, LOG2E, MASKED


def join(
    parts: Parts,
    most_parts: int,
    values: Callable[[Int[Array, "B P"]], Float[Array, "B P K G H"]],
    stats: Float[Array, "U K 2 G8"],
    sinks: Float[Array, "N"] | None,
    shape: tuple[int, int, int, int],
) -> Float[Array, "B N H"]:
    """Return the results of rows, of the shape (B, K, G, H) before KV heads and their queries are put together.

    values: weighted values of the named parts of each row. stats: maxima and sums. most_parts: of any row. Places of parts
    that a row does not have read its last one again, and count nothing.

    Reductions over an axis of parts: written as a straight line over them, these were a few launches less, and took XLA two
    to three seconds to compile for each layer.
    """
    rows, num_kv_heads, group, dim = shape
    index = jnp.arange(most_parts)
    exists = (index < parts.parts_of_row[:, None])[:, :, None, None]
    places = parts.first_parts[:, None] + jnp.clip(index, 0, jnp.maximum(parts.parts_of_row - 1, 0)[:, None])  # (B, P)
    known = stats[places][..., :group]  # (B, P, K, 2, G)
    maxima = jnp.where(exists, known[:, :, :, 0], MASKED)
    highest = maxima.max(1)
    factors = jnp.where(exists, jnp.exp2(maxima - highest[:, None]), 0.0)  # (B, P, K, G)
    total = jnp.where(exists, known[:, :, :, 1] * factors, 0.0).sum(1)
    if sinks is not None:
        total = total + jnp.exp2(sinks.reshape(num_kv_heads, group) * LOG2E - highest)
    weighted = jnp.where(exists[..., None], values(places) * factors[..., None], 0.0)
    joined = weighted.sum(1) / jnp.maximum(total, LEAST)[..., None]
    return joined.reshape(rows, num_kv_heads * group, dim)
