"""Step functions that copy pages out of the KV pool and into it.

The pages are copied one after the other by a loop: a gather or scatter along the page axis, which is not the first one,
would make XLA transpose the whole pool.

Letters: L layers, K KV heads, S tokens of a page, H head size, B pages of a batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.layers.cache import KVPool


def read_pages(pool: KVPool, blocks: Int[Array, "B"]) -> tuple[Float[Array, "B L K S H"], Float[Array, "B L K S H"]]:
    """Return copies of pages."""

    def copy(place: int | Array, copies: tuple[Array, Array]) -> tuple[Array, Array]:
        def one(half: Array, batch: Array) -> Array:
            page = jax.lax.dynamic_slice_in_dim(half, blocks[place], 1, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(batch, jnp.moveaxis(page, 1, 0), place, axis=0)

        return one(pool.k, copies[0]), one(pool.v, copies[1])

    num_layers, _, *rest = pool.k.shape
    empty = jnp.zeros((len(blocks), num_layers, *rest), pool.k.dtype)
    k, v = jax.lax.fori_loop(0, len(blocks), copy, (empty, empty))
    return k, v


def write_pages(
    pool: KVPool, blocks: Int[Array, "B"], k: Float[Array, "B L K S H"], v: Float[Array, "B L K S H"]
) -> KVPool:
    """Overwrite pages. DONATES the pool."""

    def copy(place: int | Array, pool: KVPool) -> KVPool:
        def one(half: Array, batch: Array) -> Array:
            page = jax.lax.dynamic_slice_in_dim(batch, place, 1, axis=0)
            return jax.lax.dynamic_update_slice_in_dim(half, jnp.moveaxis(page, 0, 1), blocks[place], axis=1)

        return KVPool(one(pool.k, k), one(pool.v, v))

    return KVPool(*jax.lax.fori_loop(0, len(blocks), copy, pool))
