"""The device half of the sampling options: one function per `Column` of `params.SamplingParams`.

Restrictions (top_k, top_p, min_p) are thresholds: the smallest logit a row keeps. Tokens of exactly
the threshold's logit are all kept, as in Hugging Face's warpers. Each works on a whole batch, every
row with its own option; neutral options keep everything (-inf).

Those that change logits do so in the order of `adjust.py`; a row with a neutral option keeps its logits to the bit.

Letters: B rows, V vocabulary, c candidates, W words of one bit per token, N biases, G bad words of E tokens, R tokens
before the last of a bad word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.sampling.bits import WORD_BITS
from jaxserve.sampling.topk import top_k as largest

NUM_CANDIDATES: Final = 64
ANY_TOKEN: Final = -1
"""In front of a bad word that is shorter than others may be."""
UNUSED_ID: Final = 2**31 - 1
"""No token's id: nothing is added to it."""
LOWEST_TEMPERATURE: Final = 1e-6
FORBIDDEN: Final = -1e20
"""A logit that no other one, whatever its bias or penalty, falls below: chosen only when nothing else is left."""


class Candidates(NamedTuple):
    """Scaled logits with what the thresholds need of them, computed once."""

    logits: Float[Array, "B V"]
    largest: Float[Array, "B c"]
    """The largest logits, largest first."""


def candidates(logits: Float[Array, "B V"]) -> Candidates:
    """Prepare scaled logits for thresholds."""
    return Candidates(logits, largest(logits, NUM_CANDIDATES)[0])


def logit_bias(
    num_biases: Int[Array, "B"], token_ids: Int[Array, "B N"], biases: Float[Array, "B N"]
) -> tuple[Int[Array, "B N"], Float[Array, "B N"]]:
    """Tokens and what is added to their logits."""
    return jnp.where(num_biases[:, None] > 0, token_ids, UNUSED_ID), biases


def bad_words(
    num_words: Int[Array, "B"], words: Int[Array, "B G E"], recent: Int[Array, "B R"]
) -> tuple[Int[Array, "B G"], Float[Array, "B G"]]:
    """The last token of every word whose other tokens were generated just now, and what is added to its logit."""
    before, last = words[..., :-1], words[..., -1]
    is_begun = ((before == recent[:, None]) | (before == ANY_TOKEN)).all(-1) & (num_words > 0)[:, None]  # (B, G)
    return jnp.where(is_begun, last, UNUSED_ID), jnp.full(last.shape, FORBIDDEN)


def repetition_penalty(
    logits: Float[Array, "B V"], value: Float[Array, "B"], is_seen: Bool[Array, "B V"]
) -> Float[Array, "B V"]:
    """Divide positive and multiply negative logits of tokens seen in prompt or output (arXiv 1909.05858, as in HF)."""
    factor = value[:, None]
    return jnp.where(is_seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)


def frequency_penalty(
    logits: Float[Array, "B V"], value: Float[Array, "B"], times: Int[Array, "B V"]
) -> Float[Array, "B V"]:
    """Take `value` off once for each time a token was generated, as OpenAI defines it."""
    return logits - value[:, None] * times


def presence_penalty(
    logits: Float[Array, "B V"], value: Float[Array, "B"], times: Int[Array, "B V"]
) -> Float[Array, "B V"]:
    """Take `value` off tokens that were generated, as OpenAI defines it."""
    return logits - value[:, None] * (times > 0)


def allowed_token_ids(
    logits: Float[Array, "B V"], num_allowed: Int[Array, "B"], bits: Int[Array, "B W"]
) -> Float[Array, "B V"]:
    """Forbid what is not listed, in rows that have a list."""
    return jnp.where(_members(bits, logits.shape[1]) | (num_allowed == 0)[:, None], logits, -jnp.inf)


def min_tokens(logits: Float[Array, "B V"], is_early: Bool[Array, "B"], bits: Int[Array, "B W"]) -> Float[Array, "B V"]:
    """Forbid the tokens that would end a row's request too early."""
    return jnp.where(_members(bits, logits.shape[1]) & is_early[:, None], FORBIDDEN, logits)


def logprob_token_ids(
    num_listed: Int[Array, "B"], listed: Int[Array, "B L"], most_likely: Int[Array, "B L"]
) -> Int[Array, "B L"]:
    """Whose log-probabilities a row wants to see: those on its list, or the most likely ones."""
    return jnp.where(num_listed[:, None] > 0, listed, most_likely)


def _members(bits: Int[Array, "B W"], vocab_size: int) -> Bool[Array, "B V"]:
    """Whose bit is set; see `bits.pack_bits`."""
    spread = (bits[:, :, None] >> jnp.arange(WORD_BITS)) & 1  # (B, W, 32)
    return spread.reshape(bits.shape[0], -1)[:, :vocab_size] > 0


def temperature(logits: Float[Array, "B V"], value: Float[Array, "B"]) -> Float[Array, "B V"]:
    """Divide by the temperature; greedy rows (0) stay as they are. A lower one than that would leave float32."""
    return logits / jnp.where(value > 0, jnp.maximum(value, LOWEST_TEMPERATURE), 1.0)[:, None]


def seed(value: Int[Array, "B"], positions: Int[Array, "B"]) -> Float[Array, "2 B"]:
    """Two uniform draws in [0, 1) that depend on (seed, position) alone (threefry, arXiv 1103.1580)."""

    def draw(seed: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position), (2,))

    return jax.vmap(draw)(value, positions).T


def top_k(rows: Candidates, value: Int[Array, "B"]) -> Float[Array, "B"]:
    """The k-th largest logit; 0 and k >= V keep all."""
    count = rows.largest.shape[1]
    wants = (value > 0) & (value < rows.logits.shape[1])
    kth = jnp.take_along_axis(rows.largest, jnp.clip(value - 1, 0, count - 1)[:, None], 1)[:, 0]
    beyond = wants & (value > count)

    def search() -> Array:
        enough = _smallest_with(rows.logits, lambda kept: kept.sum(-1) >= value)
        return jnp.where(beyond, enough, kth)

    threshold = jax.lax.cond(beyond.any(), search, lambda: kth)
    return jnp.where(wants, threshold, -jnp.inf)


def top_p(rows: Candidates, value: Float[Array, "B"], kept_by_top_k: Float[Array, "B"]) -> Float[Array, "B"]:
    """The logit at which the mass of the most likely tokens reaches p of what top_k kept."""
    wants = value < 1.0
    maximum = rows.largest[:, :1]
    weights = jnp.where(rows.logits >= kept_by_top_k[:, None], jnp.exp(rows.logits - maximum), 0.0)
    target = value * weights.sum(-1)
    best = jnp.where(rows.largest >= kept_by_top_k[:, None], jnp.exp(rows.largest - maximum), 0.0)
    before = jnp.cumsum(best, -1) - best  # mass of the tokens ahead of each candidate
    last = jnp.maximum(((before < target[:, None]) & (best > 0)).sum(-1) - 1, 0)
    threshold = jnp.take_along_axis(rows.largest, last[:, None], 1)[:, 0]
    beyond = wants & (best.sum(-1) < target) & (rows.largest[:, -1] > kept_by_top_k)

    def search() -> Array:
        enough = _smallest_with(rows.logits, lambda kept: jnp.where(kept, weights, 0.0).sum(-1) >= target)
        return jnp.where(beyond, enough, threshold)

    threshold = jax.lax.cond(beyond.any(), search, lambda: threshold)
    return jnp.where(wants, jnp.maximum(threshold, kept_by_top_k), kept_by_top_k)


def min_p(rows: Candidates, value: Float[Array, "B"]) -> Float[Array, "B"]:
    """The logit of a token min_p times as likely as the best."""
    return jnp.where(value > 0, rows.largest[:, 0] + jnp.log(jnp.maximum(value, 1e-30)), -jnp.inf)


def _smallest_with(logits: Float[Array, "B V"], enough: Callable[[Array], Array]) -> Float[Array, "B"]:
    """The largest threshold t for which `enough(logits >= t)` holds; taken only where the candidates do not reach.

    No loop on GPUs: one would keep the step out of a CUDA graph, and the host waiting for its condition.
    """
    keys = _ordered(logits)
    found = jax.lax.platform_dependent(
        cuda=lambda: smallest_key(keys, enough, bits=2), default=lambda: smallest_key(keys, enough, bits=1)
    )
    return _unordered(found)


def smallest_key(keys: Int[Array, "B V"], enough: Callable[[Array], Array], *, bits: int) -> Int[Array, "B"]:
    """The largest t for which `enough(keys >= t)` holds, from its highest bit to its lowest: exact for any keys.

    One bit in each of 32 passes over the row, or several in fewer passes, which are not a loop then.
    """
    lowest = jnp.full(keys.shape[0], -(2**31))

    def go_on(done: Array | int, low: Array) -> Array:
        shift = 32 - bits * (done + 1)
        steps = (low + (jnp.int32(step) << shift) for step in range(1, 1 << bits))
        return low + (sum(enough(keys >= step[:, None]).astype(jnp.int32) for step in steps) << shift)

    if bits == 1:
        found: Array = jax.lax.fori_loop(0, 32, go_on, lowest)
        return found
    return functools.reduce(lambda low, done: go_on(done, low), range(32 // bits), lowest)


def _ordered(x: Float[Array, "*s"]) -> Int[Array, "*s"]:
    """Integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _unordered(keys: Int[Array, "*s"]) -> Float[Array, "*s"]:
    return jax.lax.bitcast_convert_type(keys ^ ((keys >> 31) & 0x7FFFFFFF), jnp.float32)
