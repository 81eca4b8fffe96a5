"""Public entry of paged attention.

Letters: B rows, T tokens, N query heads, K kv heads, H head dim, L layers, P pages, S slots per page,
M pages per row at most. The pool of one model is two arrays `[L, P, K, S, H]` for all layers; ops take
the layer as an operand so that nothing of the pool's size is ever sliced or copied.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.kv_write import kv_write
from jaxserve_kernels.paged_attention import cpu, reference
from jaxserve_kernels.paged_attention.layout import Paging, Ragged, ragged_layout
from jaxserve_kernels.rope import Rotation, rotate

__all__ = ["Paging", "Ragged", "decode_attention", "mixed_attention", "ragged_layout", "write_and_attend"]


def write_and_attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    k_pages: Float[Array, "L P K S H"],
    v_pages: Float[Array, "L P K S H"],
    layer: Int[Array, ""],
    paging: Paging,
    *,
    rotation: Rotation | None = None,
    scale: float,
    sliding_window: int | None = None,
    backend: Backend = "reference",
) -> tuple[Float[Array, "T N H"], Float[Array, "L P K S H"], Float[Array, "L P K S H"]]:
    """Rotate, put the tokens' keys and values into their pages, then attend; returns the pools as well.

    One op, because a backend may keep pages in an order of its own: all of a pool's reads and writes have
    to go through the same backend. Under donation the pools are the same buffers. Without `rotation` queries and
    keys are taken as they are.
    """
    if backend == "native" and cpu.supports(q.shape[1], k_pages.shape, k_pages.dtype):
        where = (paging.block_tables, paging.kv_lengths, paging.query_starts, paging.pages, paging.slots)
        return cpu.write_and_attend(
            q, k, v, k_pages, v_pages, layer, *where, rotation=rotation, scale=scale, sliding_window=sliding_window
        )
    if rotation is not None:
        q, k = rotate(q, rotation), rotate(k, rotation)
    k_pages, v_pages = kv_write(k_pages, v_pages, layer, k, v, paging.pages, paging.slots)
    pool = (k_pages, v_pages, layer, paging.block_tables, paging.kv_lengths)
    if paging.ragged is None:
        out = decode_attention(q, *pool, scale=scale, sliding_window=sliding_window)
    else:
        out = mixed_attention(q, *pool, paging.ragged, scale=scale, sliding_window=sliding_window)
    return out, k_pages, v_pages


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
