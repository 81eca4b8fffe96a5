"""Random weights: made on the host for small models, on the device for large ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.layers.cache import KVPool
from jaxserve.models.skeleton import LeafSpec, ModelSkeleton
from jaxserve.quant.array import ArraySpec
from jaxserve.sharding.mesh import Sharding

LOGIT_SPREAD = 2.0
DIFFERENT_PAGES = 64
"""Distinct pages of a random pool; the other pages repeat them at other addresses."""

Kind = Literal["norm", "bias", "embedding", "matrix"]


def kind_of(leaf: LeafSpec) -> Kind:
    if leaf.name.endswith("bias"):
        return "bias"
    if len(leaf.shape) == 1:
        return "norm"
    return "embedding" if "embed_tokens" in leaf.name or "lm_head" in leaf.name else "matrix"


def host_leaves(skeleton: ModelSkeleton, seed: int) -> tuple[np.ndarray, ...]:
    """In the types the skeleton declares, such that heads attend unevenly, every layer matters, and logits spread by about 2.

    The same for a model whose matmuls are joined as for one where they are not.
    """

    def make(leaf: LeafSpec, name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = np.random.default_rng([seed, *name.encode()]).standard_normal(shape, np.float32)
        match kind_of(leaf):
            case "norm":
                return 1 + 0.2 * noise
            case "bias":
                return 0.3 * noise
            case "embedding":
                return noise * np.float32(LOGIT_SPREAD / shape[1] ** 0.5)
            case _:
                return noise * np.float32(1.3 / shape[1] ** 0.5)

    return tuple(
        array
        for leaf in skeleton.leaves
        for array in leaf.assemble(
            make(leaf, name, leaf.parts[name])[rows.start : rows.stop] for name, rows in leaf.sources
        )
    )


def device_leaves(skeleton: ModelSkeleton, sharding: Sharding, seed: int) -> tuple[jax.Array, ...]:
    """Made where they stay, in the types the skeleton declares; quantised weights with scales that fit them."""

    def make(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype, kind: Kind) -> jax.Array:
        if dtype == jnp.int8:
            return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8), jnp.int8)
        if dtype == jnp.float8_e4m3fn:
            return (64 * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)
        if dtype == jnp.int4:
            return jax.random.randint(key, shape, -8, 8, jnp.int8).astype(dtype)
        if kind == "norm":
            return jnp.ones(shape, dtype)
        return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[-1] ** -0.5, dtype)

    def scales(spec: ArraySpec, values: ArraySpec) -> jax.Array:
        largest = 127 if len(spec.shape) == 1 or values.dtype == jnp.float8_e4m3fn else 8
        return jnp.full(spec.shape, 1 / (largest * skeleton.config.hidden_size**0.5), spec.dtype)

    made = jax.jit(make, static_argnums=(1, 2, 3))
    keys = jax.random.split(jax.random.key(seed), len(skeleton.leaves))

    def arrays(key: jax.Array, leaf: LeafSpec) -> Iterator[tuple[ArraySpec, jax.Array]]:
        values, *others = leaf.arrays
        yield values, made(key, values.shape, values.dtype, kind_of(leaf))
        yield from ((spec, scales(spec, values)) for spec in others)

    return tuple(
        jax.device_put(array, sharding.place(spec.axes)).block_until_ready()
        for key, leaf in zip(keys, skeleton.leaves, strict=True)
        for spec, array in arrays(key, leaf)
    )


def random_pool(shape: tuple[int, ...], dtype: jnp.dtype, sharding: Sharding, seed: int) -> KVPool:
    """A KV pool full of keys and values, and no more memory than that."""

    def make(key: jax.Array) -> jax.Array:
        pages = jax.random.normal(key, (DIFFERENT_PAGES, *shape[2:]), jnp.bfloat16).astype(dtype)
        return jnp.broadcast_to(pages[jnp.arange(shape[1]) % DIFFERENT_PAGES], shape)

    made = jax.jit(make, out_shardings=sharding.place((None, "pages", "kv_heads")))
    k, v = (made(key).block_until_ready() for key in jax.random.split(jax.random.key(seed)))
    return KVPool(k, v)
