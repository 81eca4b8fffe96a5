"""Options that restrict a draw to likely tokens: `(candidates, value, *state) -> the smallest logit a row keeps`.

Tokens with exactly that logit are all kept, as in Hugging Face's warpers. A neutral option keeps everything (-inf).
c: candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxserve_kernels.alike import wide_alike
from jaxtyping import Array, Float, Int

from jaxserve.sampling.rows import count, entries
from jaxserve.sampling.topk import top_k as largest

NUM_CANDIDATES: Final = 64


class Candidates(NamedTuple):
    """Scaled logits with what the cuts need of them, computed once."""

    logits: Float[Array, "B V"]
    largest: Float[Array, "B c"]
    """The largest logits, largest first."""
    kept: Float[Array, "B"]
    """The smallest logit that the cuts so far keep."""


def candidates(logits: Float[Array, "B V"]) -> Candidates:
    """Prepare scaled logits for the first cut."""
    return Candidates(logits, largest(logits, NUM_CANDIDATES)[0], jnp.full(logits.shape[0], -jnp.inf))


def top_k(rows: Candidates, value: Int[Array, "B"]) -> Float[Array, "B"]:
    """Return the k-th largest logit; k < 1 and k >= V keep all."""
    found = rows.largest.shape[1]
    wants = (value > 0) & (value < rows.logits.shape[1])
    kth = entries(rows.largest, jnp.clip(value - 1, 0, found - 1)[:, None])[:, 0]
    beyond = wants & (value > found)

    def search() -> Array:
        enough = _smallest_with(rows.logits, lambda kept: count(kept) >= value)
        return jnp.where(beyond, enough, kth)

    threshold = jax.lax.cond(beyond.any(), search, lambda: kth)
    return jnp.where(wants, threshold, -jnp.inf)


def top_p(rows: Candidates, value: Float[Array, "B"]) -> Float[Array, "B"]:
    """Return the logit at which the mass of the most likely tokens reaches p of what is kept so far."""
    wants = value < 1.0
    maximum = rows.largest[:, :1]
    logits = wide_alike(rows.logits)
    weights = jnp.where(logits >= rows.kept[:, None], jnp.exp(logits - maximum), 0.0)
    target = value * weights.sum(-1)
    best = jnp.where(rows.largest >= rows.kept[:, None], jnp.exp(rows.largest - maximum), 0.0)
    mass = jnp.cumsum(best, -1)
    before = mass - best  # mass of the tokens ahead of each candidate
    last = jnp.maximum(count((before < target[:, None]) & (best > 0)) - 1, 0)
    threshold = entries(rows.largest, last[:, None])[:, 0]
    beyond = wants & (mass[:, -1] < target) & (rows.largest[:, -1] > rows.kept)

    def search() -> Array:
        enough = _smallest_with(logits, lambda kept: jnp.where(kept, weights, 0.0).sum(-1) >= target)
        return jnp.where(beyond, enough, threshold)

    threshold = jax.lax.cond(beyond.any(), search, lambda: threshold)
    return jnp.where(wants, threshold, -jnp.inf)


def min_p(rows: Candidates, value: Float[Array, "B"]) -> Float[Array, "B"]:
    """Return the logit of a token min_p times as likely as the best."""
    return jnp.where(value > 0, rows.largest[:, 0] + jnp.log(jnp.maximum(value, 1e-30)), -jnp.inf)


def _smallest_with(logits: Float[Array, "B V"], enough: Callable[[Array], Array]) -> Float[Array, "B"]:
    """Return the largest t for which `enough(logits >= t)` holds; used only when the candidates do not suffice.

    GPUs do without a loop: one would keep the step out of a CUDA graph and make the host wait for its condition.
    """
    keys = _ordered(logits)
    found = jax.lax.platform_dependent(
        cuda=lambda: smallest_key(keys, enough, bits=2), default=lambda: smallest_key(keys, enough, bits=1)
    )
    return _unordered(found)


def smallest_key(keys: Int[Array, "B V"], enough: Callable[[Array], Array], *, bits: int) -> Int[Array, "B"]:
    """Find the largest t for which `enough(keys >= t)` holds, from its highest bit to its lowest: exact for any keys.

    One bit in each of 32 passes over the row, or several bits in fewer passes, which are unrolled.
    """
    lowest = jnp.full(keys.shape[0], -(2**31))

    def search_bits(done: Array | int, low: Array) -> Array:
        shift = 32 - bits * (done + 1)
        steps = (low + (jnp.int32(step) << shift) for step in range(1, 1 << bits))
        return low + (sum(enough(keys >= step[:, None]).astype(jnp.int32) for step in steps) << shift)

    if bits == 1:
        found: Array = jax.lax.fori_loop(0, 32, search_bits, lowest)
        return found
    return functools.reduce(lambda low, done: search_bits(done, low), range(32 // bits), lowest)


def _ordered(x: Float[Array, "*s"]) -> Int[Array, "*s"]:
    """Return integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _unordered(keys: Int[Array, "*s"]) -> Float[Array, "*s"]:
    return jax.lax.bitcast_convert_type(keys ^ ((keys >> 31) & 0x7FFFFFFF), jnp.float32)
