"""Public entry of attention over windows and compressed blocks.

A block is `rate` tokens of a text, the first one from position 0 on; its last token ends it. The vector of a block lies in the page of the
block's last token, so that a page has all vectors that depend on no later token, and is known by the text up to its end.

Letters: B rows, T tokens, N query heads, H width of a vector, W width of what a token adds to vectors of blocks, E tokens that end a block,
C blocks that are chosen, L layers, P pages, S slots per page (tokens), U slots per page (blocks), M pages per row at most.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.compressed_attention import reference
from jaxserve_kernels.compressed_attention.reference import Closing, Compressed, Mixture
from jaxserve_kernels.kv_write import storable
from jaxserve_kernels.paged_attention.layout import Paging
from jaxserve_kernels.paged_attention.options import Scoring
from jaxserve_kernels.paged_attention.sharded import ShardAxes
from jaxserve_kernels.query_tiles import token_ends


def block_slots(page_size: int, rate: int) -> int:
    """Return U: the vectors of blocks that a page of `page_size` tokens has room for."""
    return -(-page_size // rate)


def write(
    vectors: Float[Array, "T W"], pages: Num[Array, "L P 1 S W"], layer: Int[Array, ""], paging: Paging
) -> Num[Array, "L P 1 S W"]:
    """Put the tokens' vectors into their pages; under donation the pool is the same buffer."""
    return pages.at[layer, paging.pages, 0, paging.slots].set(storable(vectors, pages.dtype))


def closing_tokens(paging: Paging, num_tokens: int, rate: int) -> Closing:
    """Return the tokens of a step that end a block, at most T / rate and one for each row."""
    rows, ends = token_ends(paging, paging.kv_lengths, num_tokens)
    most = min(num_tokens, num_tokens // rate + len(paging.kv_lengths))
    is_last = (ends > 0) & (ends % rate == 0)
    tokens = jnp.nonzero(is_last, size=most, fill_value=num_tokens)[0].astype(jnp.int32)
    known = jnp.minimum(tokens, num_tokens - 1)
    return Closing(tokens, rows[known], ends[known], is_last.sum(dtype=jnp.int32))


def compress(
    pages: Num[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    paging: Paging,
    closing: Closing,
    bias: Float[Array, "X D"],
    mixture: Mixture,
    *,
    backend: Backend = "reference",
) -> Float[Array, "E H"]:
    """Return the sums of what the tokens of each block add, weighted by a softmax over these tokens of their scores and `bias`, for
    each number of a vector, in float32; zeros after the last block.

    pages: of each token the numbers and their scores; `mixture` says where. bias: by place of a token in its block.
    """
    return reference.compress(pages, layer, paging, closing, bias, mixture, _sizes(backend))


def write_blocks(
    vectors: Float[Array, "E H"],
    pages: Num[Array, "L P 1 U H"],
    layer: Int[Array, ""],
    paging: Paging,
    closing: Closing,
    rate: int,
) -> Num[Array, "L P 1 U H"]:
    """Put the vectors of blocks into the pages of their last tokens."""
    own, slots = (jnp.take(x, closing.tokens, mode="fill", fill_value=0) for x in (paging.pages, paging.slots // rate))
    return pages.at[layer, own, 0, slots].set(storable(vectors, pages.dtype))


def write_and_attend(
    q: Float[Array, "T N H"],
    vectors: Float[Array, "T H"],
    pages: Num[Array, "L P 1 S H"],
    layer: Int[Array, ""],
    paging: Paging,
    compressed: Compressed | None = None,
    *,
    window: int,
    rate: int = 1,
    scoring: Scoring,
    sinks: Float[Array, "N"] | None = None,
    backend: Backend = "reference",
    shards: ShardAxes = ShardAxes(),  # noqa: B008  (immutable)
) -> tuple[Float[Array, "T N H"], Num[Array, "L P 1 S H"]]:
    """Put the tokens' vectors into their pages, then attend to those of the last `window` tokens, the query's own among them, and to
    the vectors of the blocks that end at the query or before; returns the weighted sums of vectors, and the pool.

    A vector is key and value. backend: `bucketed` gathers more at a time, and makes fewer loops whose rounds depend on data. compressed: the blocks, of `rate` tokens each; None: there are none. sinks: a logit of each head that takes its share and gives
    nothing. If `shards.heads` splits the heads, every device has all vectors.
    """
    pages = write(vectors, pages, layer, paging)
    operands = (q, pages, layer, paging, compressed, sinks)
    attend = partial(reference.attend, window=window, rate=rate, scoring=scoring, sizes=_sizes(backend))
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        heads, whole = shards.heads or None, PartitionSpec()
        attend = jax.shard_map(
            attend,
            in_specs=(PartitionSpec(None, heads), whole, whole, whole, whole, PartitionSpec(heads)),
            out_specs=PartitionSpec(None, heads),
            check_vma=False,  # loops do not say how their results vary
        )
    return attend(*operands), pages


def _sizes(backend: Backend) -> reference.Sizes:
    return reference.LARGE if backend == "bucketed" else reference.SMALL
