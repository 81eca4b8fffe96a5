"""What the device keeps of every running request from step to step, so that no step waits for the host.

A slot is a row of int32 words. The first ones belong to every request: its last sampled token, whether that
token ended it, and its newest tokens. The rest is for requests whose options need it: the host writes the whole
row when such a request takes its slot (`slot_row`), and the steps keep its token counts up to date. Everybody
else leaves these words alone and never reads them, so nothing has to be cleaned.

The row behind the last slot belongs to no request: padding rows, and rows that sample nothing yet, write there.

Letters: X slots, B rows, T tokens of the step, V vocabulary, W words of one bit per token, N biases, G bad words of
E tokens, R tokens that may precede the last of a bad word, L tokens whose log-probabilities are listed, M masks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxserve.sampling.adjust import GENERATED
from jaxserve.sampling.bits import num_words, pack_bits
from jaxserve.sampling.transforms import ANY_TOKEN, UNUSED_ID
from jaxserve.scheduler.plan import Mask, SlotInit
from jaxserve.types import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS

FIELDS: Final = {
    "last_token": "",
    "is_over": "",
    "recent": "R",  # generated tokens, newest last; NO_TOKEN before the first
    "earliest_stop": "",  # known tokens from which on a stop token may be sampled
    "logprob_ids": "L",  # 0 where unused
    "stops": "W",  # bits of the tokens that end the request
    "allowed": "W",  # bits
    "bias_ids": "N",  # UNUSED_ID where unused
    "biases": "N",  # float32 by their bits
    "bad_words": "G E",  # last token last; ANY_TOKEN before the first, UNUSED_ID in the last place of unused ones
    "counts": "V",  # GENERATED times how often a token was, plus one for a token of the prompt
}
NO_TOKEN: Final = -2
"""Equal to no token, nor to ANY_TOKEN."""
MASKS_AT_ONCE: Final = 16
"""Masks that one call writes."""
_ALIGNMENT: Final = 128
"""Words. Fields of several words start at a multiple: the width of a tile on TPUs."""


@dataclass(frozen=True, slots=True)
class Field:
    """A place in a row."""

    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def fields(vocab_size: int) -> dict[str, Field]:
    """The places of all fields, in order."""
    letters = {
        "R": MAX_BAD_WORD_TOKENS - 1,
        "W": num_words(vocab_size),
        "N": MAX_LOGIT_BIAS,
        "G": MAX_BAD_WORDS,
        "E": MAX_BAD_WORD_TOKENS,
        "L": MAX_TOP_LOGPROBS,
        "V": vocab_size,
    }
    found, start = {}, 0
    for name, shape in FIELDS.items():
        field = Field(start, tuple(letters[letter] for letter in shape.split()))
        if field.size > _ALIGNMENT:
            field = Field(-(-start // _ALIGNMENT) * _ALIGNMENT, field.shape)
        found[name] = field
        start = field.start + field.size
    return found


def slots_shape(num_slots: int, vocab_size: int) -> tuple[int, int]:
    """A row for every slot, and the one behind them."""
    last = list(fields(vocab_size).values())[-1]
    return num_slots + 1, last.start + last.size


def slots_bytes(num_slots: int, vocab_size: int) -> int:
    """On each device."""
    return 4 * math.prod(slots_shape(num_slots, vocab_size))


def slot_row(init: SlotInit, vocab_size: int) -> np.ndarray:
    """A request's row as it takes its slot: int32 `[S]`."""
    places = fields(vocab_size)
    row = np.zeros(slots_shape(0, vocab_size)[1], np.int32)
    view = {name: row[field.start : field.start + field.size].reshape(field.shape) for name, field in places.items()}
    sampling, generated = init.sampling, init.token_ids[init.num_prompt_tokens :]
    recent = generated[-len(view["recent"]) :]
    view["recent"][:] = NO_TOKEN
    view["recent"][len(view["recent"]) - len(recent) :] = recent
    view["earliest_stop"][...] = init.num_prompt_tokens + sampling.min_tokens
    view["stops"][:] = pack_bits(init.stop_token_ids, vocab_size)
    view["allowed"][:] = pack_bits(sampling.allowed_token_ids, vocab_size)
    view["bias_ids"][:] = UNUSED_ID
    view["bias_ids"][: len(sampling.logit_bias)] = list(sampling.logit_bias)
    biases = np.array(list(sampling.logit_bias.values()), np.float32)
    view["biases"][: len(biases)] = biases.view(np.int32)
    view["bad_words"][:] = ANY_TOKEN
    view["bad_words"][len(sampling.bad_words) :, -1] = UNUSED_ID
    for i, word in enumerate(sampling.bad_words):
        view["bad_words"][i, -len(word) :] = word
    view["logprob_ids"][: len(sampling.logprob_token_ids)] = sampling.logprob_token_ids
    counts = view["counts"]
    counts[:] = GENERATED * np.bincount(generated, minlength=vocab_size)
    counts[init.token_ids[: init.num_prompt_tokens]] += 1  # once, however often it stands there
    return row


def mask_rows(masks: Sequence[Mask], padding_slot: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Up to MASKS_AT_ONCE masks and their slots, filled up with masks for `padding_slot`: int32 `[M]`, `[M, W]`."""
    which = np.full(MASKS_AT_ONCE, padding_slot, np.int32)
    words = np.zeros((MASKS_AT_ONCE, num_words(vocab_size)), np.int32)
    for i, mask in enumerate(masks):
        which[i], words[i] = mask.slot, mask.words
    return which, words


def init_slot(slots: Int[Array, "X1 S"], slot: Int[Array, ""], row: Int[Array, "S"]) -> Int[Array, "X1 S"]:
    """The slots with one row written anew. DONATES slots."""
    return slots.at[slot].set(row)


def put_masks(
    slots: Int[Array, "X1 S"], which: Int[Array, "M"], words: Int[Array, "M W"], vocab_size: int
) -> Int[Array, "X1 S"]:
    """The slots with what some of them allow written anew. DONATES slots."""
    field = fields(vocab_size)["allowed"]
    return slots.at[which, field.start : field.start + field.size].set(words)


class SamplerState:
    """The fields of a step's rows, read when asked for: rows that do not need a field do not pay for it."""

    def __init__(self, slots: Int[Array, "X1 S"], which: Int[Array, "B"], vocab_size: int) -> None:
        self._slots, self._which = slots, which
        self._fields = fields(vocab_size)

    def __getitem__(self, name: str) -> Array:
        """`[B, ...]`"""
        field = self._fields[name]

        def read(slot: Array) -> Array:
            return jax.lax.dynamic_slice(self._slots, (slot, field.start), (1, field.size))

        return jax.vmap(read)(self._which).reshape(-1, *field.shape)


class Rows(NamedTuple):
    """The rows of a step as their slots have them."""

    last_tokens: Int[Array, "B"]
    is_over: Bool[Array, "B"]
    """The request goes on in this row, but ended by a token that the host had not read when it planned."""
    kv_lengths: Int[Array, "B"]
    """0 for rows that are over: they attend to nothing."""
    recent: Int[Array, "B R"]


def take_up(slots: Int[Array, "X1 S"], field: Mapping[str, Array], vocab_size: int) -> tuple[Int[Array, "T"], Rows]:
    """The step's tokens, unread ones filled in, and what is known of its rows."""
    with jax.named_scope("take_up"):
        tokens = field["tokens"]
        state = SamplerState(slots, field["slots"], vocab_size)
        last_tokens = state["last_token"]
        goes_on = tokens[jnp.minimum(field["query_starts"][:-1], tokens.shape[0] - 1)] < 0
        is_over = goes_on & (state["is_over"] > 0)
        filled = jnp.where(tokens < 0, last_tokens[field["rows"]], tokens)
        return filled, Rows(last_tokens, is_over, jnp.where(is_over, 0, field["kv_lengths"]), state["recent"])


def store_tokens(
    slots: Int[Array, "X1 S"],
    field: Mapping[str, Array],
    rows: Rows,
    token_ids: Int[Array, "B"],
    is_counted: Bool[Array, "B"],
    vocab_size: int,
) -> tuple[Int[Array, "X1 S"], Bool[Array, ""]]:
    """The slots with the new tokens, and whether any of these ends its request.

    The host's verdict is the truth; this is the same one for as many stop ids as a row has room for.
    is_counted: rows whose token counts somebody will read.
    """
    with jax.named_scope("store_tokens"):
        is_stop = (token_ids[:, None] == field["stop_token_ids"]).any(1)
        is_end = is_stop | (rows.kv_lengths + 1 >= field["length_limits"])  # the new token has no KV yet
        tokens = jnp.where(rows.is_over, rows.last_tokens, token_ids)
        is_over = (rows.is_over | is_end).astype(jnp.int32)
        state = jnp.concatenate([jnp.stack([tokens, is_over], 1), rows.recent[:, 1:], token_ids[:, None]], 1)
        is_sampling = field["is_sampling"] > 0
        padding_slot = slots.shape[0] - 1
        target = jnp.where(is_sampling, field["slots"], padding_slot)
        slots = slots.at[target, : state.shape[1]].set(state)
        count = fields(vocab_size)["counts"].start + token_ids
        slots = slots.at[jnp.where(is_counted, target, padding_slot), count].add(GENERATED)
        return slots, (is_sampling & is_end & ~rows.is_over).any()
