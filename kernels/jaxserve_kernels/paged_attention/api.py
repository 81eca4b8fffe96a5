"""Public entry of paged attention.

Letters: B rows, T tokens, N query heads, K kv heads, H head dim, L layers, P pages, S slots per page,
M pages per row at most. The pool of one model is two arrays `[L, P, K, S, H]` for all layers; ops take
the layer as an operand so that nothing of the pool's size is ever sliced or copied.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from jaxserve_kernels.paged_attention import reference
from jaxserve_kernels.paged_attention.layout import Ragged, ragged_layout

__all__ = ["Ragged", "decode_attention", "mixed_attention", "ragged_layout"]


def decode_attention(
    q: Float[Array, "B N H"],
    k_pages: Float[Array, "L P K S H"],
    v_pages: Float[Array, "L P K S H"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    kv_lengths: Int[Array, "B"],
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Float[Array, "B N H"]:
    """One query token per row, at position `kv_lengths - 1`, over that row's first `kv_lengths` keys.

    A row of length 0 (padding) gives zeros. With `sliding_window` a query sees that many keys, its own
    included.
    """
    return reference.decode_attention(
        q, k_pages, v_pages, layer, block_tables, kv_lengths, scale=scale, sliding_window=sliding_window
    )


def mixed_attention(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "L P K S H"],
    v_pages: Float[Array, "L P K S H"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    kv_lengths: Int[Array, "B"],
    ragged: Ragged,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Float[Array, "T N H"]:
    """Query segments of a flat token axis, each causal over its own row's keys.

    Row b's queries stand at `ragged.query_starts[b] : ragged.query_starts[b + 1]`, the last one at
    position `kv_lengths[b] - 1`. The first `ragged.num_decode_rows` rows have one query each. Tokens
    behind the last segment (padding) come out finite and meaningless.
    """
    return reference.mixed_attention(
        q, k_pages, v_pages, layer, block_tables, kv_lengths, ragged, scale=scale, sliding_window=sliding_window
    )
