"""Joins the results of parts of a row: the sums of a softmax cut in pieces (flash-decoding).

Plain JAX. Letters: B rows, U parts, K KV heads, G query heads of a KV head, N = K * G, H head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve_kernels.paged_attention.gpu.splits import Parts
from jaxserve_kernels.paged_attention.gpu.tiles import LEAST, LOG2E, MASKED


def join(
    parts: Parts,
    most_parts: int,
    values: Callable[[Int[Array, "B"]], Float[Array, "B K G H"]],
    stats: Float[Array, "U K 2 G8"],
    sinks: Float[Array, "N"] | None,
    shape: tuple[int, int, int, int],
) -> Float[Array, "B N H"]:
    """Return the results of rows, of the shape (B, K, G, H) before KV heads and their queries are put together.

    values: weighted values of one part of each row. stats: maxima and sums. most_parts: of any row.

    A straight line over the most parts that a row can have, which `splits` bounds; places of parts that a row does not
    have read its last one again, and count nothing.
    """
    rows, num_kv_heads, group, dim = shape
    places = [parts.first_parts + jnp.clip(parts.parts_of_row - 1, 0, i) for i in range(most_parts)]
    exists = [(i < parts.parts_of_row)[:, None, None, None] for i in range(most_parts)]

    def of_parts(which: int, fill: float) -> list[Array]:
        """Return a number of each part, as wide as the result: XLA then makes one launch of all this."""
        known = (jnp.broadcast_to(stats[place, :, which, :group, None], shape) for place in places)
        return [jnp.where(is_there, each, fill) for is_there, each in zip(exists, known, strict=True)]

    maxima, totals = of_parts(0, MASKED), of_parts(1, 0.0)
    highest = functools.reduce(jnp.maximum, maxima)
    factors = [jnp.exp2(maximum - highest) for maximum in maxima]
    total = sum(total * factor for total, factor in zip(totals, factors, strict=True))
    if sinks is not None:
        total = total + jnp.exp2(sinks.reshape(num_kv_heads, group, 1) * LOG2E - highest)
    joined = sum(
        jnp.where(is_there, values(place) * factor, 0.0)
        for place, is_there, factor in zip(places, exists, factors, strict=True)
    )
    joined = joined / jnp.maximum(total, LEAST)
    return joined.reshape(rows, num_kv_heads * group, dim)
