"""Options that forbid tokens: `(logits, value, *state) -> logits`. W: words of one bit per token."""

from __future__ import annotations

from typing import Final

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.sampling.bits import WORD_BITS, pack_bits
from jaxserve.sampling.transform import StateField, stateful

FORBIDDEN: Final = -1e20
"""Below every other logit, whatever its bias or penalty: such a token is chosen only when nothing else is left."""

ALLOWED = StateField("allowed", ("W",), lambda init, vocab: pack_bits(init.sampling.allowed_token_ids or (), vocab))
"""Bits of the allowed tokens. The mask of a grammar is written here before each step."""
_EARLIEST_STOP = StateField(  # known tokens from which on a stop token may be sampled
    "earliest_stop", (), lambda init, _: init.num_prompt_tokens + init.sampling.min_tokens
)
_STOPS = StateField("stops", ("W",), lambda init, vocab: pack_bits(init.stop_token_ids, vocab))


@stateful(_EARLIEST_STOP, _STOPS, is_active=lambda num_known, earliest_stop, stops: num_known < earliest_stop)
def min_tokens(
    logits: Float[Array, "B V"], value: Int[Array, "B"], earliest_stop: Int[Array, "B"], stops: Int[Array, "B W"]
) -> Float[Array, "B V"]:
    """Forbid the tokens that would end a request too early."""
    return jnp.where(_members(stops, logits.shape[1]) & (value > 0)[:, None], FORBIDDEN, logits)


@stateful(ALLOWED)
def allowed_token_ids(
    logits: Float[Array, "B V"], num_allowed: Int[Array, "B"], bits: Int[Array, "B W"]
) -> Float[Array, "B V"]:
    """Forbid what is not listed, in rows that have a list: even when nothing else is left."""
    return jnp.where(_members(bits, logits.shape[1]) | (num_allowed == 0)[:, None], logits, -jnp.inf)


def _members(bits: Int[Array, "B W"], vocab_size: int) -> Bool[Array, "B V"]:
    """Unpack `bits.pack_bits`."""
    spread = (bits[:, :, None] >> jnp.arange(WORD_BITS)) & 1  # (B, W, 32)
    return spread.reshape(bits.shape[0], -1)[:, :vocab_size] > 0
