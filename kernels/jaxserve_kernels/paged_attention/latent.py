"""Attention over latent vectors in pages: one vector per token, of which all heads make their keys and their values.

`reference` computes it as grouped-query attention with one KV head whose values are its keys: the two reads of a page are the
same, and XLA keeps one of them. Decode steps on GPUs take `latent_buckets`, which has no loop.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.kv_write import storable
from jaxserve_kernels.paged_attention import latent_buckets, reference
from jaxserve_kernels.paged_attention.layout import Paging
from jaxserve_kernels.paged_attention.options import Scoring
from jaxserve_kernels.paged_attention.sharded import ShardAxes, latents_over_mesh


def write_and_attend_latents(
    q: Float[Array, "T N W"],
    latents: Float[Array, "T 1 W"],
    pages: Num[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    paging: Paging,
    *,
    scoring: Scoring,
    backend: Backend = "reference",
    shards: ShardAxes = ShardAxes(),  # noqa: B008  (immutable)
) -> tuple[Float[Array, "*R T N W"], Num[Array, "L P 1 S W"]]:
    """Put the tokens' latent vectors into their pages, then attend; returns the weighted sums of vectors, and the pool.

    Under donation the pool is the same buffer. `paging.ragged` is cut for the backend `reference`. Queries and vectors are
    taken as they are: rotated, and with the queries multiplied by the matrices that make keys. If `shards.pages` splits the
    pool over R ranks, the sums have a leading axis R over which the caller adds: see `latents_over_mesh`.
    """
    kernel = partial(_write_then_attend, scoring=scoring, backend=backend)
    return (latents_over_mesh(kernel, shards) if shards.pages else kernel)(q, latents, pages, layer, paging)


def _write_then_attend(
    q: Float[Array, "T N W"],
    latents: Float[Array, "T 1 W"],
    pages: Num[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    paging: Paging,
    *,
    scoring: Scoring,
    backend: Backend,
) -> tuple[Float[Array, "T N W"], Num[Array, "L P 1 S W"]]:
    where = (layer, paging.pages, 0, paging.slots)
    pages = pages.at[where].set(storable(latents[:, 0], pages.dtype))
    pool = (pages, pages, layer, paging.block_tables, paging.kv_lengths)
    options: dict[str, Any] = {"scoring": scoring}
    if paging.ragged is None and backend == "bucketed":
        return latent_buckets.decode_attention(q, *pool[1:], **options), pages
    if paging.ragged is None:
        return reference.decode_attention(q, *pool, **options), pages
    return reference.mixed_attention(q, *pool, paging.ragged, **options), pages
