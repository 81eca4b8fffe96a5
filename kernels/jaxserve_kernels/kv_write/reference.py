"""kv_write as one scatter per pool: the specification, and the CPU implementation."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, Num


def kv_write(
    k_pages: Num[Array, "L P K S H"],
    v_pages: Num[Array, "L P K S H"],
    layer: Int[Array, ""],
    k: Num[Array, "T K H"],
    v: Num[Array, "T K H"],
    pages: Int[Array, "T"],
    slots: Int[Array, "T"],
) -> tuple[Num[Array, "L P K S H"], Num[Array, "L P K S H"]]:
    """See `api.kv_write`."""
    # An index for the heads too: a window over K and H would have XLA:TPU lay the pool out head-minor for
    # the scatter and back for the reads, copying all of it between layers.
    heads = jnp.arange(k.shape[1])
    where = (layer, pages[:, None], heads[None, :], slots[:, None])  # (T, K)
    return k_pages.at[where].set(k.astype(k_pages.dtype)), v_pages.at[where].set(v.astype(v_pages.dtype))
