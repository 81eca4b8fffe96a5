"""Options that add to the logits of a few tokens: `(value, *state) -> (token ids, amounts)`, both `[B, N]`.

The entries of all options are added in one scatter; UNUSED_ID adds nothing. N: biases; G: bad words of E tokens;
R: tokens before the last one of a bad word.
"""

from __future__ import annotations

from typing import Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.sampling.masks import FORBIDDEN
from jaxserve.sampling.params import SlotInit
from jaxserve.sampling.transform import StateField, padded, stateful
from jaxserve.types import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS

ANY_TOKEN: Final = -1
"""Fills a bad word that is shorter than the longest one, before its first token."""
UNUSED_ID: Final = 2**31 - 1
"""Larger than any token id: nothing is added to it."""
NO_TOKEN: Final = -2
"""Equal to no token id, nor to ANY_TOKEN."""
_NUM_RECENT: Final = MAX_BAD_WORD_TOKENS - 1


def _recent_tokens(init: SlotInit, vocab_size: int) -> np.ndarray:
    recent = init.token_ids[init.num_prompt_tokens :][-_NUM_RECENT:]
    return padded(recent[::-1], (_NUM_RECENT,), NO_TOKEN)[::-1]


def _bad_words(init: SlotInit, vocab_size: int) -> np.ndarray:
    words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), ANY_TOKEN, np.int32)
    words[len(init.sampling.bad_words) :, -1] = UNUSED_ID
    for i, word in enumerate(init.sampling.bad_words):
        words[i, -len(word) :] = word
    return words


_BIAS_IDS = StateField(
    "bias_ids",
    (MAX_LOGIT_BIAS,),
    lambda init, _: padded(list(init.sampling.logit_bias or ()), (MAX_LOGIT_BIAS,), UNUSED_ID),
)
_BIASES = StateField(
    "biases",
    (MAX_LOGIT_BIAS,),
    lambda init, _: padded(list((init.sampling.logit_bias or {}).values()), (MAX_LOGIT_BIAS,), 0.0),
    dtype="float32",
)
_RECENT = StateField(  # generated tokens, newest last; NO_TOKEN before the first
    "recent",
    (_NUM_RECENT,),
    _recent_tokens,
    after_token=lambda recent, token: jnp.concatenate([recent[:, 1:], token[:, None]], 1),
)
_BAD_WORDS = StateField("bad_words", (MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), _bad_words)


@stateful(_BIAS_IDS, _BIASES)
def logit_bias(
    num_biases: Int[Array, "B"], token_ids: Int[Array, "B N"], biases: Float[Array, "B N"]
) -> tuple[Int[Array, "B N"], Float[Array, "B N"]]:
    """Add its bias to the logit of each listed token."""
    return jnp.where(num_biases[:, None] > 0, token_ids, UNUSED_ID), biases


@stateful(_BAD_WORDS, _RECENT)
def bad_words(
    num_words: Int[Array, "B"], words: Int[Array, "B G E"], recent: Int[Array, "B R"]
) -> tuple[Int[Array, "B G"], Float[Array, "B G"]]:
    """Forbid the last token of every word whose other tokens are the newest ones."""
    before, last = words[..., :-1], words[..., -1]
    is_begun = ((before == recent[:, None]) | (before == ANY_TOKEN)).all(-1) & (num_words > 0)[:, None]  # (B, G)
    return jnp.where(is_begun, last, UNUSED_ID), jnp.full(last.shape, FORBIDDEN)
