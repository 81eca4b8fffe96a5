"""Options that change logits by the tokens a request has: `(logits, value, *state) -> logits`."""

from __future__ import annotations

from typing import Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.sampling.params import SlotInit
from jaxserve.sampling.transform import StateField, stateful

_GENERATED: Final = 2
"""Added to a token's count each time it is generated. A token of the prompt adds 1, once."""


def _token_counts(init: SlotInit, vocab_size: int) -> np.ndarray:
    prompt, generated = np.split(init.token_ids, [init.num_prompt_tokens])
    counts = _GENERATED * np.bincount(generated, minlength=vocab_size)
    if init.has_prompt_ids:
        counts[prompt] += 1  # once, however often it occurs there
    return counts


_COUNTS = StateField("counts", ("V",), _token_counts, increment=_GENERATED)


@stateful(_COUNTS)
def repetition_penalty(
    logits: Float[Array, "B V"], value: Float[Array, "B"], counts: Int[Array, "B V"]
) -> Float[Array, "B V"]:
    """Divide positive and multiply negative logits of tokens in prompt or output (arXiv 1909.05858, as in HF)."""
    factor = value[:, None]
    return jnp.where(counts > 0, jnp.where(logits > 0, logits / factor, logits * factor), logits)


@stateful(_COUNTS)
def frequency_penalty(
    logits: Float[Array, "B V"], value: Float[Array, "B"], counts: Int[Array, "B V"]
) -> Float[Array, "B V"]:
    """Subtract `value` once for each time a token was generated, as OpenAI defines it."""
    return logits - value[:, None] * (counts // _GENERATED)


@stateful(_COUNTS)
def presence_penalty(
    logits: Float[Array, "B V"], value: Float[Array, "B"], counts: Int[Array, "B V"]
) -> Float[Array, "B V"]:
    """Subtract `value` from tokens that were generated, as OpenAI defines it."""
    return logits - value[:, None] * (counts // _GENERATED > 0)
