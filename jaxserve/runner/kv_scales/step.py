"""The traced part of the measurement of scales: a step, and the largest keys and values that it has left in the cache."""

from __future__ import annotations

from typing import Final, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.layers.cache import KVPool
from jaxserve.model_config.cache import CachePlace
from jaxserve.models.skeleton import ModelSkeleton
from jaxserve.runner.inputs import Program
from jaxserve.runner.state import StateArrays
from jaxserve.runner.steps import forward

MARGIN: Final = 2.0
"""Largest number that is not clipped, over the largest measured one: text has larger keys than random tokens (see decision 0091)."""
_LARGEST: Final = 127
_HALVES: Final[tuple[Literal["k", "v"], ...]] = ("k", "v")


def measured_names(skeleton: ModelSkeleton) -> dict[str, tuple[CachePlace, Literal["k", "v"]]]:
    """Return the names of all scales, and the places of the keys and values that they are for."""
    return {
        f"model.layers.{index}.self_attn.{half}_scale": (places.paged, half)
        for index, places in enumerate(skeleton.config.cache.places)
        if places.paged is not None and places.paged.is_owner
        for half in _HALVES
    }


def measure(
    skeleton: ModelSkeleton, params: tuple[Array, ...], state: StateArrays, packed: Int[Array, "I"], program: Program
) -> tuple[StateArrays, tuple[Float[Array, "K H"], ...]]:
    """Compute a step; returns the state (DONATED) and the scales, in the order of `measured_names`. Traced."""
    state, _ = forward(skeleton, params, state, packed, program)
    scales = []
    for place, half in measured_names(skeleton).values():
        pool = (state.cache or ())[place.group]
        assert isinstance(pool, KVPool), "keys and values"
        pages = (pool.k if half == "k" else pool.v)[place.index]
        largest = jnp.abs(pages.astype(jnp.float32)).max((0, 2))  # (K, H)
        scales.append(jnp.where(largest > 0, largest * (MARGIN / _LARGEST), 1))
    return state, tuple(scales)
