"""Attention over latent vectors as grouped-query attention with one KV head whose values are the first numbers of its keys.

The two reads of a page are the same, and XLA keeps one of them.

Letters: B rows, T tokens, N query heads, W width of a vector, V of its value, L layers, P pages, S slots per page, M pages
per row.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.paged_attention import reference
from jaxserve_kernels.paged_attention.layout import Ragged
from jaxserve_kernels.paged_attention.options import Scoring


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
) -> Float[Array, "B N V"]:
    """See `api.decode_attention`."""
    where = (layer, block_tables, kv_lengths)
    return reference.decode_attention(q, pages, pages, *where, scoring=scoring, sinks=sinks)[..., :value_width]


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
) -> Float[Array, "T N V"]:
    """See `api.mixed_attention`."""
    where = (layer, block_tables, kv_lengths, ragged)
    return reference.mixed_attention(q, pages, pages, *where, scoring=scoring, sinks=sinks)[..., :value_width]
