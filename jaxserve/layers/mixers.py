"""Recurrent mixers by their configs, and their states in the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.paged_attention import Paging
from jaxserve_kernels.segments import Segments, cut_segments, decode_segments
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import StepContext
from jaxserve.layers.cache import Cache, GroupCache, PendingStates, StatePool, StateSlots, with_group
from jaxserve.layers.gated_conv import GatedConv
from jaxserve.layers.gated_delta import GatedDeltaNet
from jaxserve.layers.mamba2 import Mamba2
from jaxserve.layers.recurrent import RecurrentMixer, RecurrentState
from jaxserve.model_config.cache import CachePlace, LayerPlaces
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


class KeptTokens(NamedTuple):
    """The first tokens of each row of a step, those that stay."""

    tokens: Int[Array, "T"]
    """Their places on the step's token axis; the kept ones come first, row by row."""
    segments: Segments


def mix(
    mixer: RecurrentMixer, x: Float[Array, "T D"], cache: Cache, places: LayerPlaces, step: StepContext
) -> tuple[Float[Array, "T D"], Cache]:
    """Apply a mixer to the states of the step's rows, and put the states after their last tokens into the cache, or what they
    depend on if the group has `PendingStates`."""
    place, segments = places.state, step.segments
    assert place is not None and segments is not None, "a recurrent mixer has a state"
    group, slots = cache[place.group], step.slots(place)
    assert isinstance(group, StatePool | PendingStates), "a state group"
    inputs, rest = mixer.project(x, step.tokens)
    pool = group if isinstance(group, StatePool) else group.pool
    made, after = mixer.recur(inputs, _read(pool, place, slots), segments)
    if isinstance(group, PendingStates):
        assert len(group.inputs) == place.index, "layers come in the order of their group"
        found: GroupCache = group._replace(inputs=(*group.inputs, inputs))
    else:
        found = _written(group, place, slots, after)
    return mixer.finish(made, rest, step.tokens), with_group(cache, place, found)


def settle(mixer: RecurrentMixer, cache: Cache, place: CachePlace, slots: StateSlots, kept: KeptTokens) -> Cache:
    """Return the cache with the states of one layer after the kept tokens of each row. Its group has `PendingStates`."""
    group = cache[place.group]
    assert isinstance(group, PendingStates), "a step that may go back"
    inputs = tuple(each[kept.tokens] for each in group.inputs[place.index])
    _, after = mixer.recur(inputs, _read(group.pool, place, slots), kept.segments)
    return with_group(cache, place, group._replace(pool=_written(group.pool, place, slots, after)))


def first_tokens(rows: Paging, counts: Int[Array, "B"], num_tokens: int) -> KeptTokens:
    """Return the first `counts` tokens of each row of a step with `num_tokens` places for tokens; none of a row without tokens."""
    assert rows.ragged is not None, "rows of several tokens"
    sizes = rows.query_starts[1:] - rows.query_starts[:-1]
    counts = jnp.minimum(counts, sizes)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    first = rows.kv_lengths - sizes  # positions
    segments = cut_segments(starts, first, rows.ragged.num_decode_rows, num_tokens=num_tokens)
    own = segments.rows
    tokens = rows.query_starts[own] + jnp.arange(num_tokens) - starts[own]
    return KeptTokens(jnp.minimum(tokens, num_tokens - 1), segments)


def _read(pool: StatePool, place: CachePlace, slots: StateSlots) -> RecurrentState:
    with jax.named_scope("states"):
        return RecurrentState(*(array[place.index, slots.reads] for array in pool.arrays))


def _written(pool: StatePool, place: CachePlace, slots: StateSlots, after: RecurrentState) -> StatePool:
    with jax.named_scope("states"):
        states = [state for state in after if state is not None]
        arrays = tuple(
            array.at[place.index, slots.writes].set(state.astype(array.dtype), mode="drop")
            for array, state in zip(pool.arrays, states, strict=True)
        )
    return StatePool(arrays)
