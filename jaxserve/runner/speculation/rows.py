"""Rows of a speculative step: the chunk of tokens that each verifies, and the samples that it accepts.

Letters: B rows, N tokens that are drafted for a row, W = 1 + N tokens of a row, T = B * W, V vocabulary, X slots, R rows of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.models.skeleton import ModelSkeleton
from jaxserve.runner.slots import Rows, SamplerState
from jaxserve.sampling.sampler import Sampled, sample
from jaxserve.sharding.shard_map import batch_sharded
from jaxserve.types import LogprobsMode

Fields = dict[str, Any]
"""The fields of a packed plan by name."""
Carry = TypeVar("Carry")


class Chunk(NamedTuple):
    """The tokens that a speculative step computes: the rows' newest tokens, each followed by its draft."""

    field: Fields
    """The fields of the plan for these T tokens; real ones come first."""
    first: Int[Array, "B"]
    """Position of the newest token."""
    lengths: Int[Array, "B"]
    """Drafted tokens."""
    drafted: Int[Array, "B N"]
    places: Int[Array, "B W"]
    """The row's tokens on the flat axis; after the last one that one again."""
    is_live: Bool[Array, "B"]
    """False for padding and for rows that are over."""


def make_chunk(
    field: Fields,
    waiting: Int[Array, "B W"],
    newest: Int[Array, "B"],
    rows: Rows,
    capacity: Int[Array, "B"],
    width: int,
) -> Chunk:
    """Lay out the tokens of a speculative step. waiting: position and draft in the rows' slots; capacity: tokens that a row
    has pages for."""
    first = jnp.where(field["is_position_unread"] > 0, waiting[:, 0], field["positions"])
    most = jnp.minimum(capacity, field["length_limits"] - 1) - first - 1
    is_row = field["query_starts"][1:] > field["query_starts"][:-1]
    is_live = is_row & ~rows.is_over
    lengths = jnp.where(is_live, jnp.maximum(jnp.minimum(field["draft_lengths"], most), 0), 0)
    rows_field, ahead, places = chunk_fields(field, first, jnp.where(is_row, 1 + lengths, 0), is_live, width)
    row = rows_field["rows"]
    tokens = jnp.where(ahead == 0, newest[row], waiting[row, ahead])
    return Chunk(rows_field | {"tokens": tokens}, first, lengths, waiting[:, 1:], places, is_live)


def chunk_fields(
    field: Fields, first: Int[Array, "B"], counts: Int[Array, "B"], is_live: Bool[Array, "B"], width: int
) -> tuple[Fields, Int[Array, "T"], Int[Array, "B W"]]:
    """Return the fields of a chunk of W = `width` tokens of each row at most, which begin at position `first`; the number of
    each token in its row, 0 for padding; and the places of each row's tokens, after the last one that one again.

    counts: tokens of each row; 0 for padding rows only. is_live: False for rows that compute nothing.
    """
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    flat = jnp.arange(len(counts) * width)
    row = jnp.searchsorted(starts[1:], flat, side="right", method="compare_all")  # see `ragged_layout`
    row = jnp.minimum(row, len(counts) - 1).astype(jnp.int32)
    is_padding = flat >= starts[-1]
    ahead = jnp.where(is_padding, 0, flat - starts[row])
    wide = {
        "num_decode_rows": jnp.cumprod(counts == 1, dtype=jnp.int32).sum(dtype=jnp.int32),
        "positions": jnp.where(is_padding, 0, first[row] + ahead),
        "rows": row,
        "is_real": (~is_padding & is_live[row]).astype(jnp.int32),
        "query_starts": starts,
        "kv_lengths": jnp.where(is_live, first + counts, 0),
    }
    if "rope_positions" in field:  # of the newest tokens; after a prompt they go on by one
        turned = field["rope_positions"].reshape(3, -1) + first - field["positions"]  # (3, B)
        wide["rope_positions"] = jnp.where(is_padding, 0, turned[:, row] + ahead).reshape(-1)
    places = starts[:-1, None] + jnp.minimum(jnp.arange(width), jnp.maximum(counts, 1)[:, None] - 1)
    return field | wide, ahead, jnp.minimum(places, len(flat) - 1)


class Accepted(NamedTuple):
    """The rows of a speculative step after their samples were compared with the draft."""

    counts: Int[Array, "B"]
    """Accepted samples of each row, at least 1."""
    before: Int[Array, "B"]
    """The token before the newest one."""
    newest: Int[Array, "B"]
    """The last accepted sample."""
    position: Int[Array, "B"]
    """Its position."""


def accept(sampled: Int[Array, "T"], chunk: Chunk, field: Fields, newest: Int[Array, "B"]) -> Accepted:
    """Accept samples up to and with the first that differs from the draft or ends its request."""
    ids = sampled[chunk.places]  # (B, W)
    num_drafts = ids.shape[1] - 1
    is_right = (jnp.arange(num_drafts) < chunk.lengths[:, None]) & (ids[:, :num_drafts] == chunk.drafted)
    is_stop = (ids[:, :, None] == field["stop_token_ids"][:, None]).any(-1)
    num_known = chunk.first[:, None] + jnp.arange(2, num_drafts + 3)  # with the sample
    is_end = is_stop | (num_known >= field["length_limits"][:, None])
    counts = 1 + jnp.cumprod(is_right & ~is_end[:, :num_drafts], axis=1, dtype=jnp.int32).sum(1, dtype=jnp.int32)
    known = jnp.concatenate([newest[:, None], ids], 1)

    def at(index: Int[Array, "B"]) -> Int[Array, "B"]:
        return jnp.take_along_axis(known, index[:, None], 1)[:, 0]

    return Accepted(counts, at(counts - 1), at(counts), chunk.first + counts)


class Verified(NamedTuple):
    """The results of a speculative step from which the next tokens are drafted."""

    skeleton: ModelSkeleton
    """The model that verified."""
    field: Fields
    """The fields of the plan, by row."""
    chunk: Chunk
    hidden: Float[Array, "T D"]
    """The head's input of each token of the chunk."""
    tapped: Float[Array, "T KD"] | None
    """See `models.decoder.Forward`."""
    sampled: Int[Array, "T"]
    """The token that the model samples after each token of the chunk."""
    accepted: Accepted
    slots: Int[Array, "X1 S"]
    """The slots with the newest tokens."""
    capacity: Int[Array, "B"]
    """Tokens that a row has pages for."""


def sample_rows(
    skeleton: ModelSkeleton,
    logits: Array,
    slots: Int[Array, "X1 S"],
    by_row: tuple[Int[Array, "R C"], Int[Array, "R"], Int[Array, "R"]],
    num_top_logprobs: Int[Array, ""],
    mode: LogprobsMode = "raw_logprobs",
) -> Sampled:
    """Sample from `logits`. by_row: sampling options, slot and number of known tokens of each row."""
    vocab_size = logits.shape[1]

    def choose(logits: Array, columns: Array, which: Array, num_known: Array, *rest: Array) -> Sampled:
        slots, num_top = rest
        return sample(logits, columns, SamplerState(slots, which, vocab_size), num_known, num_top, mode)

    return batch_sharded(choose, logits, by_row, (slots, num_top_logprobs), skeleton.policy.rules)


def pass_fields(field: Fields, first: Int[Array, "B"], fits: Bool[Array, "B"], count: int = 1) -> Fields:
    """Return the fields of a pass over `count` tokens of each row, which begin at position `first`.

    fits: False for rows that compute nothing.
    """
    num_rows, size = field["query_starts"][-1], len(first)
    turned = {}
    if "rope_positions" in field:
        start = field["rope_positions"].reshape(3, -1) + first - field["positions"]  # (3, B)
        turned = {"rope_positions": (start[:, :, None] + jnp.arange(count)).reshape(-1)}
    return (
        field
        | turned
        | {
            "num_decode_rows": num_rows if count == 1 else jnp.int32(0),
            "positions": jnp.where(fits[:, None], first[:, None] + jnp.arange(count), 0).reshape(-1),
            "rows": jnp.repeat(jnp.arange(size, dtype=jnp.int32), count),
            "is_real": jnp.repeat(fits.astype(jnp.int32), count),
            "query_starts": count * jnp.minimum(jnp.arange(size + 1, dtype=jnp.int32), num_rows),
            "kv_lengths": jnp.where(fits, first + count, 0),
        }
    )


def text_fields(field: Fields) -> Fields:
    """Return the fields for a model that takes the tokens of images for text: without rows of embeddings, positions in three
    dimensions, and keys after a token."""
    own = ("image_rows", "rope_positions", "key_ends")
    return {name: value for name, value in field.items() if name not in own}


def unrolled_on_gpus(first: int, end: int, body: Callable[[Array | int, Carry], Carry], start: Carry) -> Carry:
    """Return what a loop from `first` to `end` makes of `start`; without a loop on GPUs, which would keep the step out of a
    CUDA graph."""
    if first == end:
        return start
    loop = partial(jax.lax.fori_loop, first, end, body)
    return jax.lax.platform_dependent(start, cuda=partial(loop, unroll=True), default=loop)  # type: ignore[no-any-return]
