"""Public entry of attention over latent vectors.

Letters: B rows, T tokens, N query heads, W width of a latent vector, V of its value, which are its first numbers, L layers, P
pages, S slots per page, M pages per row at most.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.kv_write import storable
from jaxserve_kernels.latent_attention import buckets, gpu, reference
from jaxserve_kernels.paged_attention.layout import Paging, Ragged, ragged_layout
from jaxserve_kernels.paged_attention.options import Scoring
from jaxserve_kernels.paged_attention.sharded import ShardAxes, latents_over_mesh


def unsupported(
    backend: Backend, pool_shape: tuple[int, ...], value_width: int, dtype: jnp.dtype, kv_dtype: jnp.dtype
) -> str | None:
    """Return in a few words why `backend` has no kernel for a pool `[L, P, 1, S, W]` and these types; None if it has one."""
    if backend == "mosaic_gpu":
        return gpu.unsupported(pool_shape, value_width, dtype, kv_dtype)
    if backend in ("mosaic_gpu_mma", "mosaic_gpu_tcgen05"):
        return "no kernel for latent attention (MLA) on GPUs other than Hopper yet"
    if backend == "mosaic_tpu":
        return "no kernel for latent attention (MLA) on TPUs yet"
    return None


def write_and_attend(
    q: Float[Array, "T N W"],
    latents: Float[Array, "T 1 W"] | None,
    pages: Num[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    paging: Paging,
    *,
    value_width: int,
    scoring: Scoring,
    sinks: Float[Array, "N"] | None = None,
    backend: Backend = "reference",
    shards: ShardAxes = ShardAxes(),  # noqa: B008  (immutable)
) -> tuple[Float[Array, "*R T N V"], Num[Array, "L P 1 S W"]]:
    """Put the tokens' latent vectors into their pages, then attend; returns the weighted sums of values, and the pool.

    Under donation the pool is the same buffer. `paging.ragged` may be cut for any backend. Queries and vectors are
    taken as they are (None: the pages hold the vectors, which another layer has written): rotated, and with the queries multiplied by the matrices that make keys. If `shards.pages` splits the
    pool over R ranks, the sums have a leading axis R over which the caller adds: see `latents_over_mesh`. sinks: a logit of each
    head that takes its share and gives nothing; not by Pallas kernels.
    """
    kernel = partial(_write_then_attend, value_width=value_width, scoring=scoring, backend=backend)
    if backend != "mosaic_gpu" and not shards.pages:
        return kernel(q, latents, pages, layer, paging, sinks)  # XLA splits its own operations by heads
    if paging.ragged is not None:
        starts, num_decode_rows = paging.ragged.query_starts, paging.ragged.num_decode_rows
        paging = paging._replace(ragged=ragged_layout(starts, num_decode_rows, num_tokens=len(q)))
    return latents_over_mesh(kernel, shards)(q, latents, pages, layer, paging, sinks)


def _write_then_attend(
    q: Float[Array, "T N W"],
    latents: Float[Array, "T 1 W"] | None,
    pages: Num[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    paging: Paging,
    sinks: Float[Array, "N"] | None = None,
    *,
    value_width: int,
    scoring: Scoring,
    backend: Backend,
) -> tuple[Float[Array, "T N V"], Num[Array, "L P 1 S W"]]:
    if latents is not None:
        pages = pages.at[layer, paging.pages, 0, paging.slots].set(storable(latents[:, 0], pages.dtype))
    pool = (pages, layer, paging.block_tables, paging.kv_lengths)
    options: dict[str, Any] = {"value_width": value_width, "scoring": scoring, "sinks": sinks, "backend": backend}
    if paging.ragged is None:
        return decode_attention(q, *pool, **options), pages
    return mixed_attention(q, *pool, paging.ragged, **options), pages


def decode_attention(
    q: Float[Array, "B N W"],
    pages: Num[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    kv_lengths: Int[Array, "B"],
    *,
    value_width: int,
    scoring: Scoring,
    sinks: Float[Array, "N"] | None = None,
    backend: Backend = "reference",
) -> Float[Array, "B N V"]:
    """Attend with one query token per row over its first `kv_lengths` vectors; zeros for a row of length 0. No window."""
    attend = buckets.decode_attention if backend == "bucketed" else _kernels(backend).decode_attention
    options = _options(value_width, scoring, sinks, backend)
    out: Array = attend(q, pages, layer, block_tables, kv_lengths, **options)
    return out


def mixed_attention(
    q: Float[Array, "T N W"],
    pages: Num[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    kv_lengths: Int[Array, "B"],
    ragged: Ragged,
    *,
    value_width: int,
    scoring: Scoring,
    sinks: Float[Array, "N"] | None = None,
    backend: Backend = "reference",
) -> Float[Array, "T N V"]:
    """Attend with query segments of a flat token axis: see `paged_attention.mixed_attention`. `ragged` is cut for `reference`."""
    attend = _kernels(backend).mixed_attention
    options = _options(value_width, scoring, sinks, backend)
    out: Array = attend(q, pages, layer, block_tables, kv_lengths, ragged, **options)
    return out


def _options(value_width: int, scoring: Scoring, sinks: Array | None, backend: Backend) -> dict[str, Any]:
    options: dict[str, Any] = {"value_width": value_width, "scoring": scoring}
    if backend == "mosaic_gpu":
        assert sinks is None, "the kernel for Hopper has no sinks"
        return options
    return options | {"sinks": sinks}


def _kernels(backend: Backend) -> ModuleType:
    """Pallas is imported where a program for a GPU is made, and nowhere else."""
    if backend == "mosaic_gpu":
        from jaxserve_kernels.latent_attention.gpu import attention

        return attention
    return reference
