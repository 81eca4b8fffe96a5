"""Public entry of kv_write. Letters as in `paged_attention.api`."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from jaxserve_kernels.kv_write import reference


def kv_write(
    k_pages: Float[Array, "L P K S H"],
    v_pages: Float[Array, "L P K S H"],
    layer: Int[Array, ""],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pages: Int[Array, "T"],
    slots: Int[Array, "T"],
) -> tuple[Float[Array, "L P K S H"], Float[Array, "L P K S H"]]:
    """Put token t's key and value at `[layer, pages[t], :, slots[t]]`.

    Returns the pools; under donation they are the same buffers. Padding tokens all write to the null
    page 0, in any order; every other (page, slot) must occur once.
    """
    return reference.kv_write(k_pages, v_pages, layer, k, v, pages, slots)
