"""Public entry of block-sparse attention.

A row is long if it has more keys than the blocks that a query attends to. Rows that are not long take `paged_attention`, whose
result is the same, and no row's path depends on other rows.

Letters: B rows, T tokens, J heads of the indexer, I width of its keys, C blocks that are chosen, N query heads, K KV heads, H
head dim, L layers, L2 those with an indexer, P pages, S slots per page, M pages per row at most.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels import paged_attention
from jaxserve_kernels.backend import NATIVE, Backend
from jaxserve_kernels.block_sparse_attention import reference
from jaxserve_kernels.block_sparse_attention.reference import BlockChoice, BlockKeys
from jaxserve_kernels.kv_write import KVScales, storable
from jaxserve_kernels.paged_attention.layout import Paging, from_pool_heads, to_pool_heads, without_long_rows
from jaxserve_kernels.paged_attention.options import Scoring
from jaxserve_kernels.paged_attention.sharded import ShardAxes, own_rows

__all__ = ["BlockChoice", "BlockKeys", "IndexOperands", "write_and_attend"]


class IndexOperands(NamedTuple):
    """The indexer of a layer: what it has of the step's tokens, and the keys of those before."""

    queries: Float[Array, "T J I"]
    """Without `block_keys`, J divides the KV heads: head j chooses for the KV heads `j * K / J ... (j + 1) * K / J - 1`. A factor above 0
    does not change what is chosen."""
    keys: Float[Array, "T I"]
    pages: Num[Array, "L2 P 1 S I"]
    layer: Int[Array, ""]
    """The layer's place in `pages`."""
    block_keys: BlockKeys | None = None
    """Keys of blocks, among which all J heads choose together (`BlockChoice.is_pooled`); None: each token has a key of its own."""


def write_and_attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    k_pages: Num[Array, "L P K2 S H2"],
    v_pages: Num[Array, "L P K2 S H2"],
    layer: Int[Array, ""],
    paging: Paging,
    index: IndexOperands,
    *,
    choice: BlockChoice,
    scoring: Scoring,
    scales: KVScales | None = None,
    backend: Backend = "reference",
    shards: ShardAxes = ShardAxes(),  # noqa: B008  (immutable)
) -> tuple[Float[Array, "T N H"], Num[Array, "L P K2 S H2"], Num[Array, "L P K2 S H2"], Num[Array, "L2 P 1 S I"]]:
    """Put the tokens' keys, values and keys of the indexer into their pages, choose blocks and attend to them; returns the pools
    of keys, of values and of the indexer as well.

    Queries and keys are rotated. backend: one of XLA's, because others keep pages in orders of their own; `bucketed` attends
    to rows that are not long in buckets, and takes large blocks of keys. If `shards.pages` splits the pools over ranks, each
    rank computes its own rows, and the ranks exchange their results. Devices that split KV heads choose for their own, and all
    hold every key of the indexer; if blocks have keys, all of them make the same choice.
    """
    assert backend not in NATIVE, "native kernels keep pages of keys in an order of their own"
    assert paging.key_ends is None, "block-sparse attention is causal"
    index_pages = index.pages.at[index.layer, paging.pages, 0, paging.slots].set(
        storable(index.keys, index.pages.dtype)
    )
    capacity = paging.block_tables.shape[1] * k_pages.shape[3]
    may_be_long = capacity > choice.num_tokens
    others = without_long_rows(paging, choice.num_tokens, k_pages.shape[3]) if may_be_long else paging
    options: dict[str, Any] = {"scoring": scoring, "scales": scales, "backend": backend, "shards": shards}
    out, k_pages, v_pages = paged_attention.write_and_attend(q, k, v, k_pages, v_pages, layer, others, **options)
    if not may_be_long:
        return out, k_pages, v_pages, index_pages
    num_kv_heads, dim, group = k.shape[1], q.shape[2], q.shape[1] // k.shape[1]
    if scales is not None:  # a score is linear in its key, and the result in the values
        q = (q * jnp.repeat(scales.by_number.k, group, axis=0)).astype(q.dtype)
    wide, *_ = to_pool_heads(q, k, v, k_pages.shape)
    is_pooled = index.block_keys is not None
    queries = index.queries if is_pooled else jnp.repeat(index.queries, num_kv_heads // index.queries.shape[1], axis=1)
    sizes = reference.LARGE if backend == "bucketed" else reference.SMALL

    def on_device(
        q: Float[Array, "T N H2"],
        queries: Float[Array, "T J I"],
        k_pages: Num[Array, "L P K2 S H2"],
        v_pages: Num[Array, "L P K2 S H2"],
        index_pages: Num[Array, "L2 P 1 S I"],
        places: tuple[Array, Array, BlockKeys | None],
        paging: Paging,
    ) -> Float[Array, "T N H2"]:
        def attended() -> Float[Array, "T N H2"]:
            layer, index_layer, keys = places
            if keys is None:
                chosen = reference.choose(queries, index_pages, index_layer, paging, choice, sizes)
            else:
                chosen = reference.choose_pooled(queries, keys, index_pages, index_layer, paging, choice, sizes)
                chosen = jnp.repeat(chosen, q.shape[1] // group, axis=1)
            return reference.attend(q, k_pages, v_pages, layer, paging, chosen, choice, sizes, scoring=scoring)

        found: Array = jax.lax.cond(
            (paging.kv_lengths > choice.num_tokens).any(), attended, lambda: jnp.zeros(q.shape, q.dtype)
        )
        return found

    def on_rank(
        q: Float[Array, "T N H2"],
        queries: Float[Array, "T J I"],
        k_pages: Num[Array, "L P K2 S H2"],
        v_pages: Num[Array, "L P K2 S H2"],
        index_pages: Num[Array, "L2 P 1 S I"],
        places: tuple[Array, Array, BlockKeys | None],
        paging: Paging,
    ) -> Float[Array, "T N H2"]:
        own, _ = own_rows(paging, k_pages.shape[1], jax.lax.axis_index(shards.pages))
        found = on_device(q, queries, k_pages, v_pages, index_pages, places, own)
        added: Array = jax.lax.psum(found, shards.pages)  # rows of other ranks are zeros
        return added

    attend, mesh = on_device, jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        heads, ranks, whole = PartitionSpec(None, shards.heads or None), shards.pages or None, PartitionSpec()
        pool = PartitionSpec(None, ranks, shards.heads or None)
        attend = jax.shard_map(
            on_rank if shards.pages else on_device,
            in_specs=(heads, whole if is_pooled else heads, pool, pool, PartitionSpec(None, ranks), whole, whole),
            out_specs=heads,
            check_vma=False,  # loops do not say how their results vary
        )
    found = attend(wide, queries, k_pages, v_pages, index_pages, (layer, index.layer, index.block_keys), paging)
    found = from_pool_heads(found, num_kv_heads, dim, k_pages.shape)
    if scales is not None:
        found = (found * jnp.repeat(scales.by_number.v, group, axis=0)).astype(q.dtype)
    return out + found, k_pages, v_pages, index_pages  # of each token one of the two is zero
