"""Recurrent mixers by their configs, and their states in the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.segments import Segments, cut_segments, decode_segments
from jaxserve_kernels.states import PooledStates
from jaxtyping import Array, Bool, Float, Int, Num

from jaxserve.layers.attention import StepContext
from jaxserve.layers.cache import Cache, GroupCache, PendingStates, StatePool, StateSlots, with_group
from jaxserve.layers.recurrent import Parameters, RecurrentMixer, RecurrentState
from jaxserve.layers.recurrent_mixers.gated_conv import GatedConv
from jaxserve.layers.recurrent_mixers.gated_delta import GatedDeltaNet, KimiDelta
from jaxserve.layers.recurrent_mixers.lightning import LightningAttention
from jaxserve.layers.recurrent_mixers.mamba import Mamba
from jaxserve.layers.recurrent_mixers.mamba2 import Mamba2
from jaxserve.model_config.cache import CachePlace
from jaxserve.model_config.recurrent import (
    GatedDeltaConfig,
    KimiDeltaConfig,
    LightningConfig,
    Mamba2Config,
    MambaConfig,
    ShortConvConfig,
)
from jaxserve.sharding.rules import Axes, MeshAxes
from jaxserve.sharding.shard_map import all_reduce, sharded

MIXERS: Final[Mapping[type, Callable[..., nnx.Module]]] = {
    GatedDeltaConfig: GatedDeltaNet,
    KimiDeltaConfig: KimiDelta,
    LightningConfig: LightningAttention,
    Mamba2Config: Mamba2,
    MambaConfig: Mamba,
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
    mixer: RecurrentMixer, x: Num[Array, "T *D"], cache: Cache, place: CachePlace | None, step: StepContext
) -> tuple[Float[Array, "T O"], Cache]:
    """Apply a mixer to the states of the step's rows, and put the states after their last tokens into the cache, or what they
    depend on if the group has `PendingStates`."""
    assert place is not None, "a recurrent mixer has a state"
    group = cache[place.group]
    inputs, rest = mixer.project(x, step.tokens)
    if isinstance(group, PendingStates):
        assert len(group.inputs) == place.index, "layers come in the order of their group"
        sizes = step.rows.query_starts[1:] - step.rows.query_starts[:-1]
        counts = None if mixer.takes_tokens_in_turn else sizes
        assert step.segments is not None, "a step of a recurrent model"
        step = step._replace(segments=step.segments.without_whole_chunks())  # rows of drafts
        made, _ = _recur(mixer, inputs, group.pool, place, step, counts, is_written=False)
        found: GroupCache = group._replace(inputs=(*group.inputs, inputs))
    else:
        assert isinstance(group, StatePool), "a state group"
        made, found = _recur(mixer, inputs, group, place, step)
    return mixer.finish(made, rest, step.tokens), with_group(cache, place, found)


def settle(mixer: RecurrentMixer, cache: Cache, place: CachePlace, step: StepContext, counts: Int[Array, "B"]) -> Cache:
    """Return the cache with the states of one layer after the first `counts` tokens of each row. Its group has `PendingStates`."""
    group = cache[place.group]
    assert isinstance(group, PendingStates), "a step that may go back"
    inputs = group.inputs[place.index]
    _, pool = _recur(mixer, inputs, group.pool, place, with_segments(step, len(inputs[0])), counts)
    return with_group(cache, place, group._replace(pool=pool))


def _recur(
    mixer: RecurrentMixer,
    inputs: tuple[Array, ...],
    pool: StatePool,
    place: CachePlace,
    step: StepContext,
    counts: Int[Array, "B"] | None = None,
    *,
    is_written: bool = True,
) -> tuple[Float[Array, "T ..."], StatePool]:
    """Read the states of the rows, and write those after their last tokens: every device for its heads and the slots of its rank.

    counts: the number of tokens of each row that stay, which are computed as decode steps compute them; None: all of them, maybe
    in chunks. What is read for each token is returned on every device: a sum over the ranks in which one term is not zero.
    """
    assert step.segments is not None, "a step of a recurrent model"
    heads, ranks = mixer.head_axis, mixer.rules.mesh_axes("pages")

    def on_device(
        parameters: Parameters,
        inputs: tuple[Array, ...],
        slots: StateSlots,
        segments: Segments,
        counts: Int[Array, "B"] | None,
        *arrays: Array,
    ) -> tuple[Array, ...]:
        own, is_own = _own_slots(slots, arrays[0].shape[1], ranks)
        before = _read(arrays, place, own, is_written=is_written)
        if counts is not None and mixer.takes_tokens_in_turn:
            (inputs, segments), counts = _first_tokens(inputs, segments, counts), None
        if counts is None:
            made, after = mixer.recur(parameters, inputs, before, segments)
        else:
            recur = partial(mixer.recur, parameters)
            made, after = _recur_by_token(recur, inputs, _copied(before), segments, counts)
            after = _pooled(before, after)
        if is_own is not None:
            is_own = is_own[segments.rows].reshape(-1, *[1] * (made.ndim - 1))
            made = all_reduce(jnp.where(is_own, made, 0), made.dtype, ranks)
        return (made, *(each.pool for each in after if isinstance(each, PooledStates)))

    # A window's channels are its last axis, and a state's heads the first one after that of slots.
    axes: list[Axes] = [
        (None, "pages", None, heads) if array.ndim == 4 else (None, "pages", heads) for array in pool.arrays
    ]
    operands = [
        (mixer.parameters, () if heads is None else (heads,)),
        (inputs, (None, heads)),
        *((each, ()) for each in (step.slots(place), step.segments, counts)),
        *zip(pool.arrays, axes, strict=True),
    ]
    made, *arrays = sharded(on_device, operands, [(None, heads), *axes], mixer.rules)
    return made, StatePool(tuple(arrays))


def _own_slots(slots: StateSlots, num_slots: int, ranks: MeshAxes) -> tuple[StateSlots, Bool[Array, "B"] | None]:
    """Return the slots as the device's rank sees them, and which rows are its own; None: all of them.

    Rank r has the slots `r * num_slots ... (r + 1) * num_slots - 1`, the first of which has zeros. Rows of other ranks read the
    zeros, and write nothing.
    """
    if not ranks:
        return slots, None
    rank = jax.lax.axis_index(ranks)
    is_own = slots.reads // num_slots == rank
    first = rank * num_slots
    reads, writes = jnp.where(is_own, slots.reads - first, 0), jnp.where(is_own, slots.writes - first, num_slots)
    return StateSlots(reads, writes), is_own


def _first_tokens(
    inputs: tuple[Array, ...], segments: Segments, counts: Int[Array, "B"]
) -> tuple[tuple[Array, ...], Segments]:
    """Return the inputs of the first `counts` tokens of each row, without gaps between rows, and their segments."""
    num_tokens = len(inputs[0])
    starts = jnp.pad(jnp.cumsum(counts, dtype=jnp.int32), (1, 0))
    kept = cut_segments(starts, jnp.zeros_like(counts), jnp.int32(0), num_tokens=num_tokens)
    places = segments.starts[kept.rows] + jnp.arange(num_tokens) - starts[kept.rows]
    return tuple(each[jnp.minimum(places, num_tokens - 1)] for each in inputs), kept.without_whole_chunks()


def _recur_by_token(
    recur: Callable[..., tuple[Array, RecurrentState]],
    inputs: tuple[Array, ...],
    before: RecurrentState,
    rows: Segments,
    counts: Int[Array, "B"],
) -> tuple[Float[Array, "T ..."], RecurrentState]:
    """Return what is read for each token, and the states after the first `counts` tokens of each row.

    All rows take their first token, then their second, and so on, as in decode steps, so the states are those of decode steps. The
    token axis has the same number W of places for each row. recur: `RecurrentMixer.recur` with its parameters.
    """
    num_tokens, num_rows = len(inputs[0]), len(counts)
    ahead = jnp.arange(num_tokens // num_rows)[:, None]  # (W, 1)
    places = jnp.minimum(rows.starts[:-1] + ahead, num_tokens - 1)  # (W, B)
    segments = decode_segments(jnp.arange(num_rows + 1))

    def step(state: RecurrentState, token: tuple[tuple[Array, ...], Array]) -> tuple[RecurrentState, Array]:
        own, is_token = token
        made, after = recur(own, state, segments)
        kept = jax.tree.map(partial(_where_row, is_token), after, state)
        # Else XLA computes the states of one token again in every kernel of the next ones.
        found: tuple[RecurrentState, Array] = jax.lax.optimization_barrier((kept, made))
        return found

    steps = tuple(each[places] for each in inputs), ahead < counts
    after, made = jax.lax.scan(step, before, steps, unroll=len(ahead) if len(ahead) <= MAX_UNROLLED else 1)
    order = jnp.arange(num_tokens) - rows.starts[rows.rows]
    return made[jnp.clip(order, 0, len(ahead) - 1), rows.rows], after


def _where_row(is_token: Bool[Array, "B"], new: Float[Array, "B ..."], old: Float[Array, "B ..."]) -> Array:
    return jnp.where(is_token.reshape(-1, *[1] * (new.ndim - 1)), new.astype(old.dtype), old)


def _read(arrays: tuple[Array, ...], place: CachePlace, slots: StateSlots, *, is_written: bool) -> RecurrentState:
    """Return the pools with the rows' windows and states."""
    writes = slots.writes if is_written else None
    found = [PooledStates(pool, place.index, slots.reads, writes) for pool in arrays]
    has_window = len(arrays) > 1 or arrays[0].ndim == 4
    return RecurrentState(*found) if has_window else RecurrentState(None, *found)


def _copied(state: RecurrentState) -> RecurrentState:
    """Return copies of a state that is in pools."""
    with jax.named_scope("states"):
        return RecurrentState(*(each.read() if isinstance(each, PooledStates) else None for each in state))


def _pooled(before: RecurrentState, after: RecurrentState) -> RecurrentState:
    """Return the state after, which has copies, in the pools of the state before. DONATES the pools."""
    with jax.named_scope("states"):
        return RecurrentState(*map(_written, before, after))


def _written(before: Array | PooledStates | None, after: Array | PooledStates | None) -> PooledStates | None:
    if not isinstance(before, PooledStates):
        return None
    assert isinstance(after, jax.Array), "copies of states"
    return before.written(after)
