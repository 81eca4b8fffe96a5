"""State of every running request that stays on the device, so that no step waits for the host.

A slot is a row of int32 words. The first ones belong to every request: its last sampled token, and whether that token
ended it. The rest is the state of sampling options, `sampler.STATE_FIELDS`: the host writes the whole row when a
request whose options need state gets the slot (`slot_row`), and the steps keep it up to date. The state of other
requests is undefined and never read, so nothing has to be cleaned.

The row after the last slot belongs to no request: padding rows, and rows that sample nothing yet, write there.

Letters: X slots, B rows, T tokens of the step, W words of one bit per token, M masks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxserve.sampling.bits import num_words
from jaxserve.sampling.masks import ALLOWED
from jaxserve.sampling.params import SlotInit
from jaxserve.sampling.sampler import STATE_FIELDS, uses_state
from jaxserve.sampling.transform import StateField
from jaxserve.scheduler.plan import Mask

MASKS_AT_ONCE: Final = 16
"""Masks that one call writes."""
_LAST_TOKEN: Final = "last_token"
_IS_OVER: Final = "is_over"
_ALIGNMENT: Final = 128
"""Words. Fields of more words start at a multiple of it, the width of a tile on TPUs."""


@dataclass(frozen=True, slots=True)
class Field:
    """A place in a row."""

    start: int
    shape: tuple[int, ...]
    dtype: str = "int32"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.start + self.size


@cache
def fields(vocab_size: int) -> Mapping[str, Field]:
    """Return the places of all fields: those that change with every token are first, without gaps, large ones last."""
    found, start = {_LAST_TOKEN: Field(0, ()), _IS_OVER: Field(1, ())}, 2

    def is_large(state: StateField) -> bool:
        return state.after_token is None and math.prod(state.dims(vocab_size)) > _ALIGNMENT

    for state in sorted(STATE_FIELDS, key=is_large):
        start = -(-start // _ALIGNMENT) * _ALIGNMENT if is_large(state) else start
        field = Field(start, state.dims(vocab_size), state.dtype)
        found[state.name], start = field, field.end
    return found


def slots_shape(num_slots: int, vocab_size: int) -> tuple[int, int]:
    """Return the shape of the array: a row for every slot, and one for padding."""
    return num_slots + 1, max(field.end for field in fields(vocab_size).values())


def slots_bytes(num_slots: int, vocab_size: int) -> int:
    return 4 * math.prod(slots_shape(num_slots, vocab_size))


def slot_row(init: SlotInit, vocab_size: int) -> np.ndarray:
    """Return a request's first row, int32 `[S]`."""
    row = np.zeros(slots_shape(0, vocab_size)[1], np.int32)
    for state in STATE_FIELDS:
        field = fields(vocab_size)[state.name]
        values = np.broadcast_to(np.asarray(state.initial(init, vocab_size), field.dtype), field.shape)
        row[field.start : field.end] = values.reshape(-1).view(np.int32)
    return row


def mask_rows(masks: Sequence[Mask], padding_slot: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return up to MASKS_AT_ONCE masks and their slots, filled up with masks for `padding_slot`: int32 `[M]`, `[M, W]`."""
    which = np.full(MASKS_AT_ONCE, padding_slot, np.int32)
    words = np.zeros((MASKS_AT_ONCE, num_words(vocab_size)), np.int32)
    for i, mask in enumerate(masks):
        which[i], words[i] = mask.slot, mask.words
    return which, words


def init_slot(slots: Int[Array, "X1 S"], slot: Int[Array, ""], row: Int[Array, "S"]) -> Int[Array, "X1 S"]:
    """Overwrite one row. DONATES slots."""
    return slots.at[slot].set(row)


def put_masks(
    slots: Int[Array, "X1 S"], which: Int[Array, "M"], words: Int[Array, "M W"], vocab_size: int
) -> Int[Array, "X1 S"]:
    """Overwrite the allowed tokens of some slots. DONATES slots."""
    field = fields(vocab_size)[ALLOWED.name]
    return slots.at[which, field.start : field.end].set(words)


class SamplerState:
    """The fields of a step's rows, each read when asked for: a step that does not need a field does not pay for it."""

    def __init__(self, slots: Int[Array, "X1 S"], which: Int[Array, "B"], vocab_size: int) -> None:
        self._slots, self._which = slots, which
        self._fields = fields(vocab_size)

    def __getitem__(self, name: str) -> Array:
        """Return the field of each row, `[B, ...]`."""
        field = self._fields[name]

        def read(slot: Array) -> Array:
            return jax.lax.dynamic_slice(self._slots, (slot, field.start), (1, field.size))

        words = jax.vmap(read)(self._which).reshape(-1, *field.shape)
        return words if field.dtype == "int32" else jax.lax.bitcast_convert_type(words, field.dtype)


class Rows(NamedTuple):
    """The rows of a step as their slots have them."""

    last_tokens: Int[Array, "B"]
    is_over: Bool[Array, "B"]
    """True for rows whose request ended by a token that the host had not read when it planned the step."""
    kv_lengths: Int[Array, "B"]
    """0 for rows that are over: they attend to nothing."""


def take_up(slots: Int[Array, "X1 S"], field: Mapping[str, Array], vocab_size: int) -> tuple[Int[Array, "T"], Rows]:
    """Return the step's tokens, the unread ones filled in from the slots, and its rows.

    Its results, and those of the sampler before `store_tokens`, pass a barrier: XLA would repeat a read of the slots where a
    value is used after they are written, and copy the slots of all requests for it.
    """
    with jax.named_scope("take_up"):
        tokens = field["tokens"]
        state = SamplerState(slots, field["slots"], vocab_size)
        last_tokens = state[_LAST_TOKEN]
        goes_on = tokens[jnp.minimum(field["query_starts"][:-1], tokens.shape[0] - 1)] < 0
        is_over = goes_on & (state[_IS_OVER] > 0)
        filled = jnp.where(tokens < 0, last_tokens[field["rows"]], tokens)
        rows = Rows(last_tokens, is_over, jnp.where(is_over, 0, field["kv_lengths"]))
        found: tuple[Array, Rows] = jax.lax.optimization_barrier((filled, rows))
        return found


def store_tokens(
    slots: Int[Array, "X1 S"], field: Mapping[str, Array], rows: Rows, token_ids: Int[Array, "B"], vocab_size: int
) -> tuple[Int[Array, "X1 S"], Bool[Array, ""]]:
    """Update the slots with the new tokens; also return True if any of these ends its request.

    The host decides about ends; this verdict is the same for as many stop ids as a row has room for.
    """
    with jax.named_scope("store_tokens"):
        is_stop = (token_ids[:, None] == field["stop_token_ids"]).any(1)
        is_end = is_stop | (rows.kv_lengths + 1 >= field["length_limits"])  # the new token has no KV yet
        tokens = jnp.where(rows.is_over, rows.last_tokens, token_ids)
        is_over = (rows.is_over | is_end).astype(jnp.int32)
        state, places = SamplerState(slots, field["slots"], vocab_size), fields(vocab_size)
        updated = [s.after_token(state[s.name], token_ids) for s in STATE_FIELDS if s.after_token is not None]
        words = jnp.concatenate([jnp.stack([tokens, is_over], 1), *map(_words, updated)], 1)
        is_sampling = field["is_sampling"] > 0
        padding_slot = slots.shape[0] - 1
        target = jnp.where(is_sampling, field["slots"], padding_slot)
        slots = slots.at[target, : words.shape[1]].set(words)
        for counter in (s for s in STATE_FIELDS if s.increment):
            counted = jnp.where(uses_state(field["sampling"], counter), target, padding_slot)
            slots = slots.at[counted, places[counter.name].start + token_ids].add(counter.increment)
        return slots, (is_sampling & is_end & ~rows.is_over).any()


def _words(values: Array) -> Int[Array, "B S"]:
    words = values if values.dtype == jnp.int32 else jax.lax.bitcast_convert_type(values, jnp.int32)
    return words.reshape(len(values), -1)
