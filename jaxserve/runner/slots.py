"""What the device keeps of every running request from step to step, so that no step waits for the host.

A slot holds the request's last sampled token and whether that token ended it. The row behind the last
slot belongs to nobody: padding rows, and rows that sample nothing yet, write there.

Letters: X slots, B rows, T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Rows(NamedTuple):
    """The rows of a step as their slots have them."""

    last_tokens: Int[Array, "B"]
    is_over: Bool[Array, "B"]
    """The request goes on in this row, but ended by a token that the host had not read when it planned."""
    kv_lengths: Int[Array, "B"]
    """0 for rows that are over: they attend to nothing."""


def slots_shape(num_slots: int) -> tuple[int, int]:
    """Last token and end, for every slot and for the row behind them."""
    return num_slots + 1, 2


def take_up(slots: Int[Array, "X1 2"], field: Mapping[str, Array]) -> tuple[Int[Array, "T"], Rows]:
    """The step's tokens, those that nobody has read filled in, and what is known of its rows."""
    with jax.named_scope("take_up"):
        tokens = field["tokens"]
        state = slots[field["slots"]]  # (B, 2)
        goes_on = tokens[jnp.minimum(field["query_starts"][:-1], tokens.shape[0] - 1)] < 0
        is_over = goes_on & (state[:, 1] > 0)
        filled = jnp.where(tokens < 0, state[field["rows"], 0], tokens)
        return filled, Rows(state[:, 0], is_over, jnp.where(is_over, 0, field["kv_lengths"]))


def store_tokens(
    slots: Int[Array, "X1 2"], field: Mapping[str, Array], rows: Rows, token_ids: Int[Array, "B"]
) -> tuple[Int[Array, "X1 2"], Bool[Array, ""]]:
    """The slots with the new tokens, and whether any of these ends its request.

    The host's verdict is the truth; this is the same one for as many stop ids as a row has room for.
    """
    with jax.named_scope("store_tokens"):
        is_stop = (token_ids[:, None] == field["stop_token_ids"]).any(1)
        is_end = is_stop | (rows.kv_lengths + 1 >= field["length_limits"])  # the new token has no KV yet
        tokens = jnp.where(rows.is_over, rows.last_tokens, token_ids)
        state = jnp.stack([tokens, (rows.is_over | is_end).astype(jnp.int32)], 1)  # (B, 2)
        is_sampling = field["is_sampling"] > 0
        target = jnp.where(is_sampling, field["slots"], slots.shape[0] - 1)
        return slots.at[target].set(state), (is_sampling & is_end & ~rows.is_over).any()
