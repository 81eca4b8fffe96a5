"""Attention over the devices of a mesh: every device attends with its own heads, over its own pages.

XLA cannot split a kernel as it splits its own operations: `shard_map` splits it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Num

from jaxserve_kernels.paged_attention.layout import Paging, Tiling, ragged_layout

Results = tuple[Float[Array, "T N H"], Num[Array, "L P K S H2"], Num[Array, "L P K S H2"]]
AttentionKernel = Callable[[Array, Array, Array, Array, Array, Array, Paging, Array | None], Results]


class ShardAxes(NamedTuple):
    """Mesh axes that split attention. Static."""

    heads: tuple[str, ...] = ()
    """Axes that split query heads, their sinks and KV heads alike; none: every device has all heads."""
    pages: tuple[str, ...] = ()
    """Axes that split the pages of the pool. All pages of a row lie on one rank of these axes, which alone computes it."""


def over_mesh(kernel: AttentionKernel, shards: ShardAxes, tiling: Tiling | None = None) -> AttentionKernel:
    """Return a function that runs the kernel on each device of the mesh in context, if there is one.

    Where pages are split, every rank is given all tokens, computes the rows whose pages it has, and the ranks exchange
    their results: a sum in which one term is not zero. tiling: see `layout.ragged_layout`.
    """

    def on_rank(
        q: Float[Array, "T N H"],
        k: Num[Array, "T K H"],
        v: Num[Array, "T K H"],
        k_pages: Num[Array, "L P K S H2"],
        v_pages: Num[Array, "L P K S H2"],
        layer: Int[Array, ""],
        paging: Paging,
        sinks: Float[Array, "N"] | None,
    ) -> Results:
        rank = jax.lax.axis_index(shards.pages)
        own, is_own = own_rows(paging, k_pages.shape[1], rank, tiling)
        out, k_pages, v_pages = kernel(q, k, v, k_pages, v_pages, layer, own, sinks)
        out = jnp.where(is_own[:, None, None], out, jnp.zeros_like(out))
        return jax.lax.psum(out, shards.pages), k_pages, v_pages

    def shared(
        q: Float[Array, "T N H"],
        k: Num[Array, "T K H"],
        v: Num[Array, "T K H"],
        k_pages: Num[Array, "L P K S H2"],
        v_pages: Num[Array, "L P K S H2"],
        layer: Int[Array, ""],
        paging: Paging,
        sinks: Float[Array, "N"] | None = None,
    ) -> Results:
        operands = (q, k, v, k_pages, v_pages, layer, paging, sinks)
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return kernel(*operands)
        heads, pages = _entry(shards.heads), _entry(shards.pages)
        tokens, pool, whole = PartitionSpec(None, heads), PartitionSpec(None, pages, heads), PartitionSpec()
        split: AttentionKernel = jax.shard_map(
            on_rank if shards.pages else kernel,
            in_specs=(tokens, tokens, tokens, pool, pool, whole, whole, PartitionSpec(heads)),
            out_specs=(tokens, pool, pool),
            check_vma=False,  # kernels do not say how their results vary
        )
        return split(*operands)

    return shared


LatentKernel = Callable[[Array, Array | None, Array, Array, Paging, Array | None], tuple[Array, Array]]


def latents_over_mesh(kernel: LatentKernel, shards: ShardAxes) -> LatentKernel:
    """Return a function that runs the kernel on each device of the mesh in context, if there is one, with its own heads.

    If `shards.pages` splits the pages over R ranks, the function returns `[R, T, N, V]`: every rank's own rows, and zeros for
    those of the others. What is linear in them comes before the sum over R, which is the exchange: it then moves fewer numbers.
    """

    def on_rank(
        q: Float[Array, "T N W"],
        latents: Float[Array, "T 1 W"] | None,
        pages: Num[Array, "L P 1 S W"],
        layer: Int[Array, ""],
        paging: Paging,
        sinks: Float[Array, "N"] | None,
    ) -> tuple[Float[Array, "1 T N V"], Num[Array, "L P 1 S W"]]:
        own, is_own = own_rows(paging, pages.shape[1], jax.lax.axis_index(shards.pages))
        out, pages = kernel(q, latents, pages, layer, own, sinks)
        return jnp.where(is_own[:, None, None], out, jnp.zeros_like(out))[None], pages

    def shared(
        q: Float[Array, "T N W"],
        latents: Float[Array, "T 1 W"] | None,
        pages: Num[Array, "L P 1 S W"],
        layer: Int[Array, ""],
        paging: Paging,
        sinks: Float[Array, "N"] | None,
    ) -> tuple[Float[Array, "*R T N V"], Num[Array, "L P 1 S W"]]:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return kernel(q, latents, pages, layer, paging, sinks)
        heads, ranks, whole = _entry(shards.heads), _entry(shards.pages), PartitionSpec()
        queries, pool = PartitionSpec(None, heads), PartitionSpec(None, ranks)
        split: LatentKernel = jax.shard_map(
            on_rank if shards.pages else kernel,
            in_specs=(queries, whole, pool, whole, whole, PartitionSpec(heads)),
            out_specs=(PartitionSpec(ranks, None, heads) if shards.pages else queries, pool),
            check_vma=False,  # kernels do not say how their results vary
        )
        return split(q, latents, pages, layer, paging, sinks)

    return shared


def own_rows(
    paging: Paging, num_pages: int, rank: Int[Array, ""], tiling: Tiling | None = None
) -> tuple[Paging, Bool[Array, "T"]]:
    """Return the step as one rank of the pool sees it, and which tokens are its own.

    Rank r has pages `r * num_pages ... (r + 1) * num_pages - 1`, the first of which is its null page. Rows of other ranks
    have no keys there, and their tokens are written to the null page, as padding is.
    """
    first = rank * num_pages
    is_own = paging.pages // num_pages == rank  # (T,)
    starts, ends = paging.query_starts[:-1], paging.query_starts[1:]
    is_own_row = (ends > starts) & is_own[jnp.maximum(ends - 1, 0)]  # (B,)
    ragged = paging.ragged
    if ragged is not None:
        ragged = ragged_layout(
            ragged.query_starts, ragged.num_decode_rows, num_tokens=len(is_own), tiling=tiling, is_cut=is_own_row
        )
    own = Paging(
        block_tables=jnp.where(is_own_row[:, None], jnp.maximum(paging.block_tables - first, 0), 0),
        kv_lengths=jnp.where(is_own_row, paging.kv_lengths, 0),
        query_starts=paging.query_starts,
        pages=jnp.where(is_own, paging.pages - first, 0),
        slots=jnp.where(is_own, paging.slots, 0),
        ragged=ragged,
        key_ends=paging.key_ends,
    )
    return own, is_own


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """Return an entry of a PartitionSpec."""
    return axes[0] if len(axes) == 1 else axes or None
