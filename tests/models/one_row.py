"""A cache for one text, and the steps that compute it, without an engine."""

from __future__ import annotations

from typing import Any, Final

import jax.numpy as jnp
from jaxserve_kernels.paged_attention import Paging, ragged_layout
from jaxtyping import Array

from jaxserve.layers.attention import StepContext
from jaxserve.layers.cache import ArrayShape, Cache, StateSlots, assemble, group_shapes
from jaxserve.layers.rope import query_scales, rotation, sliding_rotation
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.sharding.mesh import Sharding

PAGE_SIZE: Final = 16


def new_cache(
    decoder: DecoderConfig, num_pages: int, kv_dtype: Any, activations: Any, sharding: Sharding | None = None
) -> Cache:
    """Return zeros, on the devices of `sharding`: pages for one text after the null page, a state slot after the zero slot."""

    def zeros(array: ArrayShape) -> Array:
        return jnp.zeros(array.shape, array.dtype, device=None if sharding is None else sharding.place(array.axes))

    shapes = (
        group_shapes(group, num_pages + 1 if group.has_pages else 2, PAGE_SIZE, jnp.dtype(kv_dtype), activations)
        for group in decoder.cache.groups
    )
    return tuple(assemble(group.kind, [zeros(array) for array in group.arrays]) for group in shapes)


def step_context(decoder: DecoderConfig, num_pages: int, first: Array, num_tokens: int) -> StepContext:
    """Return what the layers get of the text's tokens from position `first` on."""
    positions, starts = first + jnp.arange(num_tokens), jnp.array([0, num_tokens])
    paging = Paging(
        block_tables=jnp.arange(1, num_pages + 1)[None],
        kv_lengths=first[None] + num_tokens,
        query_starts=starts,
        pages=positions // PAGE_SIZE + 1,
        slots=positions % PAGE_SIZE,
        ragged=None if num_tokens == 1 else ragged_layout(starts, jnp.int32(0), num_tokens=num_tokens),
    )
    slots = StateSlots(reads=jnp.minimum(first, 1)[None], writes=jnp.array([1]))
    return StepContext(
        rotation(decoder, positions),
        sliding_rotation(decoder, positions),
        tuple(paging if group.has_pages else slots for group in decoder.cache.groups),
        query_scales=query_scales(decoder, positions),
        positions=positions,
    )
