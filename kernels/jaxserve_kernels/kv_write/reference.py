"""kv_write as one scatter per pool: the specification, and the CPU implementation."""

from __future__ import annotations

from jaxtyping import Array, Float, Int


def kv_write(
    k_pages: Float[Array, "L P K S H"],
    v_pages: Float[Array, "L P K S H"],
    layer: Int[Array, ""],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pages: Int[Array, "T"],
    slots: Int[Array, "T"],
) -> tuple[Float[Array, "L P K S H"], Float[Array, "L P K S H"]]:
    """See `api.kv_write`."""
    k_pages = k_pages.at[layer, pages, :, slots].set(k.astype(k_pages.dtype))
    v_pages = v_pages.at[layer, pages, :, slots].set(v.astype(v_pages.dtype))
    return k_pages, v_pages
