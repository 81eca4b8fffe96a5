"""Recurrent mixers by their configs, and their states in the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.paged_attention import Paging
from jaxserve_kernels.segments import cut_segments, decode_segments
from jaxtyping import Array, Bool, Float, Int

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
MAX_UNROLLED: Final = 8
"""Most tokens of a row for which a speculative step has no loop: on GPUs, a loop keeps it out of a CUDA graph."""


def with_segments(step: StepContext, num_tokens: int) -> StepContext:
    """Add the rows as recurrent layers take them, once for all layers."""
    rows = step.rows
    starts = rows.query_starts
    if rows.ragged is None:
        return step._replace(segments=decode_segments(starts))
    positions = rows.kv_lengths - (starts[1:] - starts[:-1])
    return step._replace(segments=cut_segments(starts, positions, rows.ragged.num_decode_rows, num_tokens=num_tokens))


def mix(
    mixer: RecurrentMixer, x: Float[Array, "T D"], cache: Cache, places: LayerPlaces, step: StepContext
) -> tuple[Float[Array, "T D"], Cache]:
    """Apply a mixer to the states of the step's rows, and put the states after their last tokens into the cache, or what they
    depend on if the group has `PendingStates`."""
    place = places.state
    assert place is not None, "a recurrent mixer has a state"
    group, slots = cache[place.group], step.slots(place)
    inputs, rest = mixer.project(x, step.tokens)
    if isinstance(group, PendingStates):
        assert len(group.inputs) == place.index, "layers come in the order of their group"
        sizes = step.rows.query_starts[1:] - step.rows.query_starts[:-1]
        made, _ = _recur_by_token(mixer, inputs, _read(group.pool, place, slots), step.rows, sizes)
        found: GroupCache = group._replace(inputs=(*group.inputs, inputs))
    else:
        assert isinstance(group, StatePool) and step.segments is not None, "a state group"
        made, after = mixer.recur(inputs, _read(group, place, slots), step.segments)
        found = _written(group, place, slots, after)
    return mixer.finish(made, rest, step.tokens), with_group(cache, place, found)


def settle(mixer: RecurrentMixer, cache: Cache, place: CachePlace, step: StepContext, counts: Int[Array, "B"]) -> Cache:
    """Return the cache with the states of one layer after the first `counts` tokens of each row. Its group has `PendingStates`."""
    group, slots = cache[place.group], step.slots(place)
    assert isinstance(group, PendingStates), "a step that may go back"
    before = _read(group.pool, place, slots)
    _, after = _recur_by_token(mixer, group.inputs[place.index], before, step.rows, counts)
    return with_group(cache, place, group._replace(pool=_written(group.pool, place, slots, after)))


def _recur_by_token(
    mixer: RecurrentMixer, inputs: tuple[Array, ...], before: RecurrentState, rows: Paging, counts: Int[Array, "B"]
) -> tuple[Float[Array, "T ..."], RecurrentState]:
    """Return what is read for each token, and the states after the first `counts` tokens of each row.

    All rows take their first token, then their second, and so on, as in decode steps, so the states are those of decode steps. The
    token axis has the same number W of places for each row.
    """
    num_tokens, num_rows = len(inputs[0]), len(counts)
    ahead = jnp.arange(num_tokens // num_rows)[:, None]  # (W, 1)
    places = jnp.minimum(rows.query_starts[:-1] + ahead, num_tokens - 1)  # (W, B)
    segments = decode_segments(jnp.arange(num_rows + 1))

    def step(state: RecurrentState, token: tuple[tuple[Array, ...], Array]) -> tuple[RecurrentState, Array]:
        own, is_token = token
        made, after = mixer.recur(own, state, segments)
        kept = jax.tree.map(partial(_where_row, is_token), after, state)
        # Else XLA computes the states of one token again in every kernel of the next ones.
        found: tuple[RecurrentState, Array] = jax.lax.optimization_barrier((kept, made))
        return found

    steps = tuple(each[places] for each in inputs), ahead < counts
    after, made = jax.lax.scan(step, before, steps, unroll=len(ahead) if len(ahead) <= MAX_UNROLLED else 1)
    row = jnp.searchsorted(rows.query_starts[1:], jnp.arange(num_tokens), side="right", method="compare_all")
    row = jnp.minimum(row, num_rows - 1)
    return made[jnp.clip(jnp.arange(num_tokens) - rows.query_starts[row], 0, len(ahead) - 1), row], after


def _where_row(is_token: Bool[Array, "B"], new: Float[Array, "B ..."], old: Float[Array, "B ..."]) -> Array:
    return jnp.where(is_token.reshape(-1, *[1] * (new.ndim - 1)), new.astype(old.dtype), old)


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
