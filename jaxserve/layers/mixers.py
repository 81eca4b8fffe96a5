"""Recurrent mixers by their configs, and their states in the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
from flax import nnx
from jaxserve_kernels.segments import cut_segments, decode_segments
from jaxtyping import Array, Float

from jaxserve.layers.attention import StepContext
from jaxserve.layers.cache import Cache, StatePool, with_group
from jaxserve.layers.gated_conv import GatedConv
from jaxserve.layers.gated_delta import GatedDeltaNet
from jaxserve.layers.mamba2 import Mamba2
from jaxserve.layers.recurrent import RecurrentState
from jaxserve.model_config.cache import LayerPlaces
from jaxserve.model_config.recurrent import GatedDeltaConfig, Mamba2Config, ShortConvConfig

MIXERS: Final[Mapping[type, Callable[..., nnx.Module]]] = {
    GatedDeltaConfig: GatedDeltaNet,
    Mamba2Config: Mamba2,
    ShortConvConfig: GatedConv,
}
"""The module of a mixer, by the type of its config."""


def with_segments(step: StepContext, num_tokens: int) -> StepContext:
    """Add the rows as recurrent layers take them, once for all layers."""
    rows = step.rows
    starts = rows.query_starts
    if rows.ragged is None:
        return step._replace(segments=decode_segments(starts))
    positions = rows.kv_lengths - (starts[1:] - starts[:-1])
    return step._replace(segments=cut_segments(starts, positions, rows.ragged.num_decode_rows, num_tokens=num_tokens))


def mix(
    mixer: Any, x: Float[Array, "T D"], cache: Cache, places: LayerPlaces, step: StepContext
) -> tuple[Float[Array, "T D"], Cache]:
    """Apply a mixer to the states of the step's rows, and put the states after their last tokens into the cache."""
    place, segments = places.state, step.segments
    assert place is not None and segments is not None, "a recurrent mixer has a state"
    pool, slots = cache[place.group], step.slots(place)
    assert isinstance(pool, StatePool), "a state group"
    with jax.named_scope("states"):
        before = RecurrentState(*(array[place.index, slots.reads] for array in pool.arrays))
    out, after = mixer(x, before, segments, step.tokens)
    with jax.named_scope("states"):
        arrays = tuple(
            array.at[place.index, slots.writes].set(state.astype(array.dtype), mode="drop")
            for array, state in zip(pool.arrays, after, strict=False)
        )
    return out, with_group(cache, place, StatePool(arrays))
