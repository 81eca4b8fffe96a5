"""Everything that changes logits before a token is chosen from them: biases, penalties, and what is forbidden.

Biases come first, then the penalties in the order repetition, frequency, presence, as in vLLM. What is forbidden by
a list of allowed tokens is gone; what `bad_words` and `min_tokens` forbid is only made so unlikely that it is chosen
when nothing else is left, since something has to be.

A mask that somebody else makes for a step, such as a grammar's, has its place beside that of `allowed_token_ids`, in
the same packed form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.sampling import transforms

GENERATED: Final = 2
"""What a generated token adds to its entry of `counts`; that it stands in the prompt adds 1, once."""


@runtime_checkable
class StateFields(Protocol):
    """What was kept of each row's request, by the names of `runner.slots.FIELDS`; read only where it is used."""

    def __getitem__(self, name: str, /) -> Array: ...


def is_penalized(options: Mapping[str, Array]) -> Bool[Array, "B"]:
    """Rows whose logits depend on the tokens they have so far: these have to be counted."""
    repetition = options["repetition_penalty"]  # 0 in padding rows
    additive = (options["presence_penalty"] != 0) | (options["frequency_penalty"] != 0)
    return additive | ((repetition != 1) & (repetition > 0))


def is_adjusted(options: Mapping[str, Array], state: StateFields, num_known: Int[Array, "B"]) -> Bool[Array, "B"]:
    """Rows for which `adjust` does anything."""
    num_listed = options["logit_bias"] + options["allowed_token_ids"] + options["bad_words"]
    return is_penalized(options) | (num_listed > 0) | _keeps_stops_back(options, state, num_known)


def adjust(
    logits: Float[Array, "B V"], options: Mapping[str, Array], state: StateFields, num_known: Int[Array, "B"]
) -> Float[Array, "B V"]:
    """The logits to choose from. Work that no row asks for is skipped.

    num_known: tokens that each row's request has, prompt and output.
    """

    penalized = is_penalized(options)
    held = _keeps_stops_back(options, state, num_known)

    def add(x: Array) -> Array:
        biases = jax.lax.bitcast_convert_type(state["biases"], jnp.float32)
        biased = transforms.logit_bias(options["logit_bias"], state["bias_ids"], biases)
        worded = transforms.bad_words(options["bad_words"], state["bad_words"], state["recent"])
        ids, values = (jnp.concatenate(pair, 1) for pair in zip(biased, worded, strict=True))
        return x.at[jnp.arange(x.shape[0])[:, None], ids].add(values, mode="drop")

    def penalize(x: Array) -> Array:
        counts = state["counts"]
        times = counts // GENERATED
        x = transforms.repetition_penalty(x, jnp.where(penalized, options["repetition_penalty"], 1.0), counts > 0)
        x = transforms.frequency_penalty(x, options["frequency_penalty"], times)
        return transforms.presence_penalty(x, options["presence_penalty"], times)

    def mask(x: Array) -> Array:
        x = transforms.min_tokens(x, held, state["stops"])
        return transforms.allowed_token_ids(x, options["allowed_token_ids"], state["allowed"])

    for wanted, change in (
        ((options["logit_bias"] > 0) | (options["bad_words"] > 0), add),
        (penalized, penalize),
        ((options["allowed_token_ids"] > 0) | held, mask),
    ):
        logits = jax.lax.cond(wanted.any(), change, lambda x: x, logits)
    return logits


def _keeps_stops_back(options: Mapping[str, Array], state: StateFields, num_known: Array) -> Bool[Array, "B"]:
    return (options["min_tokens"] > 0) & (num_known < state["earliest_stop"])
