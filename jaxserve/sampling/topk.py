"""The largest entries of long rows, exactly, without sorting them."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.sampling.rows import entries

MAX_SORTED: Final = 4096
"""Most entries of a row that is sorted. XLA sorts longer ones, in 89 to 132 rows on an H100, with a library that cannot be part
of a CUDA graph: the host would wait for the sampler's branches in every step (`IsCubSortFasterOnH100` of XLA's
`sort_rewriter.cc`)."""
_CHUNK: Final = 64


def chunked(x: Float[Array, "B V"], size: int, fill: float) -> Float[Array, "B C X"]:
    """Cut rows into chunks of `size` entries, the last one filled up."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=fill).reshape(x.shape[0], -1, size)


def top_k(x: Float[Array, "B V"], k: int) -> tuple[Float[Array, "B k"], Int[Array, "B k"]]:
    """Return values and indices of the k largest, largest first, ties to the lowest index.

    The k largest lie within the k chunks of largest maximum, so only those are searched. Chosen chunks are put back in
    index order, which keeps the tie rule of `lax.top_k`.
    """
    k = min(k, x.shape[1])
    if x.shape[1] <= max(MAX_SORTED, k * _CHUNK):
        values, indices = jax.lax.top_k(x, k)
        return values, indices.astype(jnp.int32)
    chunks = chunked(x, _CHUNK, -jnp.inf)
    _, chosen = top_k(chunks.max(-1), k)
    chosen = jnp.sort(chosen, -1)
    values, within = jax.lax.top_k(entries(chunks, chosen[..., None]).reshape(x.shape[0], -1), k)
    indices = entries(chosen, within // _CHUNK) * _CHUNK + within % _CHUNK
    return values, indices.astype(jnp.int32)
