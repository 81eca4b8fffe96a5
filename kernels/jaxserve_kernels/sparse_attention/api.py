"""Public entry of sparse attention over latent vectors.

A row is long if it has more than C keys, C being the tokens that a query attends to. Rows that are not long take
`latent_attention`, whose result is the same, and no row's path depends on other rows.

Keys may stand for pools of Z tokens (GLM-5.3): whole pools are chosen, and the tokens after the last whole pool that a query sees
come to them.

Letters: B rows, T tokens, J heads of the indexer, I width of its keys, C tokens that are chosen, N query heads, W width of a
latent vector, V of its value, L layers, P pages, S slots per page (tokens), U slots per page (blocks), M pages per row at most, R data ranks.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels import latent_attention
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.kv_write import storable
from jaxserve_kernels.paged_attention.layout import Paging, without_long_rows
from jaxserve_kernels.paged_attention.options import Scoring
from jaxserve_kernels.paged_attention.sharded import ShardAxes, own_rows
from jaxserve_kernels.sparse_attention import reference


class IndexQueries(NamedTuple):
    """The indexer's queries of a step's tokens: the score of a key k is the sum over heads of weight * max(0, query . k)."""

    queries: Float[Array, "T J I"]
    weights: Float[Array, "T J"]
    """Float32. Of both, a factor above 0 does not change which keys are chosen."""
    pool_bias: Float[Array, "Z I"] | None = None
    """Float32. Tokens `i * Z ... i * Z + Z - 1` have one key: in each dimension the sum of theirs, weighted by the softmax over
    these tokens of their gates and this bias. A token's gates come after its key in the pages. None: each token has a key of its
    own."""

    @property
    def pool_size(self) -> int:
        """Tokens of a key."""
        return 1 if self.pool_bias is None else len(self.pool_bias)


def write_and_choose(
    index: IndexQueries,
    keys: Float[Array, "T W"],
    pages: Num[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    paging: Paging,
    *,
    num_chosen: int,
    backend: Backend = "reference",
    shards: ShardAxes = ShardAxes(),  # noqa: B008  (immutable)
) -> tuple[Int[Array, "*R T C"], Num[Array, "L P 1 S W"]]:
    """Put the tokens' keys into their pages, then choose the tokens that each token of a long row attends to; returns the
    pool as well. num_chosen: of pools of Z tokens, those of the chosen pools and Z - 1 more. W: I, or twice that of pools.

    The positions of a token ascend, and there are as many as `reference.num_attended` says; the rest is 0, as are those of
    tokens of other rows. Of equal scores the earlier positions are chosen. If `shards.pages` splits the pool over R ranks,
    there is a leading axis R, and each rank knows its own rows. All other devices compute the same.
    """
    blocks = _blocks(backend)

    def on_device(
        index: IndexQueries,
        keys: Float[Array, "T W"],
        pages: Num[Array, "L P 1 S W"],
        layer: Int[Array, ""],
        paging: Paging,
    ) -> tuple[Int[Array, "T C"], Num[Array, "L P 1 S W"]]:
        pages = pages.at[layer, paging.pages, 0, paging.slots].set(storable(keys, pages.dtype))
        shape = (len(keys), _most_chosen(paging, pages, num_chosen))
        if not _may_be_long(paging, pages, num_chosen):
            return jnp.zeros(shape, jnp.int32), pages
        chosen = jax.lax.cond(
            (paging.kv_lengths > num_chosen).any(),
            lambda: reference.choose(
                index.queries, index.weights, pages, layer, paging, num_chosen, blocks, index.pool_bias
            ),
            lambda: jnp.zeros(shape, jnp.int32),
        )
        return chosen, pages

    def on_rank(
        index: IndexQueries,
        keys: Float[Array, "T W"],
        pages: Num[Array, "L P 1 S W"],
        layer: Int[Array, ""],
        paging: Paging,
    ) -> tuple[Int[Array, "1 T C"], Num[Array, "L P 1 S W"]]:
        own, _ = own_rows(paging, pages.shape[1], jax.lax.axis_index(shards.pages))
        chosen, pages = on_device(index, keys, pages, layer, own)
        return chosen[None], pages

    if not _has_mesh():
        return on_device(index, keys, pages, layer, paging)
    whole, pool = PartitionSpec(), PartitionSpec(None, shards.pages or None)
    split = jax.shard_map(
        on_rank if shards.pages else on_device,
        in_specs=(whole, whole, pool, whole, whole),
        out_specs=(PartitionSpec(shards.pages or None), pool),
        check_vma=False,  # loops do not say how their results vary
    )
    found: tuple[Array, Array] = split(index, keys, pages, layer, paging)
    return found


def choose_blocks(
    index: IndexQueries,
    pages: Num[Array, "L P 1 U I"],
    layer: Int[Array, ""],
    paging: Paging,
    *,
    num_chosen: int,
    rate: int,
    backend: Backend = "reference",
) -> Int[Array, "T C"]:
    """Choose the blocks of `rate` tokens that each token of a row with more than C of them attends to, among those that end at the
    token or before.

    pages: one key for each block, U = S / rate to a page; the keys of this step's blocks are in their pages. The numbers of blocks
    ascend; those of tokens with at most C blocks before them have no meaning. Of equal scores the earlier blocks are chosen. All
    devices of a mesh compute the same.
    """
    sizes = _blocks(backend)
    shape = (len(index.queries), _most_chosen(paging, pages, num_chosen))
    if not _may_be_long(paging, pages, num_chosen):
        return jnp.zeros(shape, jnp.int32)

    def on_device(
        index: IndexQueries, pages: Num[Array, "L P 1 U I"], layer: Int[Array, ""], paging: Paging
    ) -> Int[Array, "T C"]:
        chosen: Array = jax.lax.cond(
            (paging.kv_lengths // rate > num_chosen).any(),
            lambda: reference.choose(index.queries, index.weights, pages, layer, paging, num_chosen, sizes, rate=rate),
            lambda: jnp.zeros(shape, jnp.int32),
        )
        return chosen

    if not _has_mesh():
        return on_device(index, pages, layer, paging)
    whole = PartitionSpec()
    split = jax.shard_map(on_device, in_specs=(whole,) * 4, out_specs=whole, check_vma=False)
    found: Array = split(index, pages, layer, paging)
    return found


def write_and_attend(
    q: Float[Array, "T N W"],
    latents: Float[Array, "T 1 W"] | None,
    pages: Num[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    paging: Paging,
    chosen: Int[Array, "*R T C"],
    *,
    num_chosen: int,
    pool_size: int = 1,
    value_width: int,
    scoring: Scoring,
    sinks: Float[Array, "N"] | None = None,
    backend: Backend = "reference",
    shards: ShardAxes = ShardAxes(),  # noqa: B008  (immutable)
) -> tuple[Float[Array, "*R T N V"], Num[Array, "L P 1 S W"]]:
    """Put the tokens' latent vectors into their pages, then attend to the chosen ones, as `latent_attention.write_and_attend`
    does to all. chosen: from `write_and_choose`. pool_size: that of the indexer.
    """
    others = without_long_rows(paging, num_chosen, pages.shape[3])
    may_be_long = _may_be_long(paging, pages, num_chosen)
    out, pages = latent_attention.write_and_attend(
        q,
        latents,
        pages,
        layer,
        others if may_be_long else paging,
        value_width=value_width,
        scoring=scoring,
        sinks=sinks,
        backend=backend,
        shards=shards,
    )
    if not may_be_long:
        return out, pages

    def on_device(
        q: Float[Array, "T N W"],
        pages: Num[Array, "L P 1 S W"],
        layer: Int[Array, ""],
        paging: Paging,
        chosen: Int[Array, "T C"],
        sinks: Float[Array, "N"] | None,
    ) -> Float[Array, "T N V"]:
        attend = partial(
            reference.attend,
            num_chosen=num_chosen,
            pool_size=pool_size,
            scoring=scoring,
            sinks=sinks,
            blocks=_blocks(backend),
        )
        attended: Array = jax.lax.cond(
            (paging.kv_lengths > num_chosen).any(),
            lambda: attend(q, pages, layer, paging, chosen)[..., :value_width],
            lambda: jnp.zeros((*q.shape[:2], value_width), q.dtype),
        )
        return attended

    def on_rank(
        q: Float[Array, "T N W"],
        pages: Num[Array, "L P 1 S W"],
        layer: Int[Array, ""],
        paging: Paging,
        chosen: Int[Array, "1 T C"],
        sinks: Float[Array, "N"] | None,
    ) -> Float[Array, "1 T N V"]:
        own, _ = own_rows(paging, pages.shape[1], jax.lax.axis_index(shards.pages))
        return on_device(q, pages, layer, own, chosen[0], sinks)[None]

    attend = on_device
    if _has_mesh():
        heads, ranks, whole = PartitionSpec(None, shards.heads or None), shards.pages or None, PartitionSpec()
        attend = jax.shard_map(
            on_rank if shards.pages else on_device,
            in_specs=(
                heads,
                PartitionSpec(None, ranks),
                whole,
                whole,
                PartitionSpec(ranks),
                PartitionSpec(shards.heads or None),
            ),
            out_specs=PartitionSpec(ranks, None, shards.heads or None) if shards.pages else heads,
            check_vma=False,  # loops do not say how their results vary
        )
    # Of each token one of the two is zero.
    return out + attend(q, pages, layer, paging, chosen, sinks), pages


def _blocks(backend: Backend) -> reference.Blocks:
    return reference.LARGE_BLOCKS if backend == "bucketed" else reference.Blocks()


def _most_chosen(paging: Paging, pages: Array, num_chosen: int) -> int:
    """Return C: no more tokens than a row's pages hold are chosen."""
    return min(num_chosen, paging.block_tables.shape[1] * pages.shape[3])


def _may_be_long(paging: Paging, pages: Array, num_chosen: int) -> bool:
    return paging.block_tables.shape[1] * pages.shape[3] > num_chosen


def _has_mesh() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1
