"""From logits to tokens, for a batch in which every row has its own options.

A row's result depends on its own logits, options, seed and position only. Work that no row asks for
is skipped at run time (`lax.cond`), so one program serves every mix of options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.sampling import transforms
from jaxserve.sampling.adjust import StateFields, adjust, is_adjusted
from jaxserve.sampling.params import COLUMNS
from jaxserve.sampling.topk import CHUNK, chunked, top_k
from jaxserve.types import MAX_TOP_LOGPROBS, NO_LOGPROBS


class Sampled(NamedTuple):
    """One sampled token per row and its log-probabilities under the unscaled logits."""

    token_ids: Int[Array, "B"]
    logprobs: Float[Array, "B"]
    top_token_ids: Int[Array, "B 20"]
    top_logprobs: Float[Array, "B 20"]


class Scored(NamedTuple):
    """What the model thinks of tokens that were given to it."""

    logprobs: Float[Array, "B"]
    ranks: Int[Array, "B"]
    """1: no token is more likely."""
    top_token_ids: Int[Array, "B 20"]
    top_logprobs: Float[Array, "B 20"]


def unpack_options(columns: Int[Array, "B C"]) -> dict[str, Array]:
    """The option columns by name, floats restored from their bits."""
    return {
        name: columns[:, i] if column.dtype == "int32" else jax.lax.bitcast_convert_type(columns[:, i], jnp.float32)
        for i, (name, column) in enumerate(COLUMNS.items())
    }


def sample(
    logits: Float[Array, "B V"],
    options: Mapping[str, Array],
    state: StateFields,
    positions: Int[Array, "B"],
    num_top_logprobs: Int[Array, ""],
) -> Sampled:
    """Choose each row's token for `positions`; log-probabilities are filled as far as any are wanted.

    num_top_logprobs: NO_LOGPROBS leaves out the chosen tokens' as well, a pass over all logits on a CPU.
    """
    is_greedy = options["temperature"] == 0
    adjusts = is_adjusted(options, state, positions).any()

    def choose() -> Array:
        # Scaling comes inside, since it makes an array of its own anyway: the logits are still needed as they are.
        scaled = jax.lax.cond(
            adjusts,
            lambda: transforms.temperature(adjust(logits, options, state, positions), options["temperature"]),
            lambda: transforms.temperature(logits, options["temperature"]),
        )
        return jnp.where(is_greedy, _most_likely(scaled), _draw(scaled, options, positions))

    token_ids = jax.lax.cond(is_greedy.all() & ~adjusts, lambda: _most_likely(logits), choose)
    normalizer = jax.lax.cond(
        num_top_logprobs > NO_LOGPROBS,
        # XLA turns a branch of nothing but reductions into a select of both, unless something stops it.
        lambda: _normalizer(jax.lax.optimization_barrier(logits)),
        lambda: jnp.zeros_like(logits[:, 0]),
    )
    chosen = jnp.take_along_axis(logits, token_ids[:, None], 1)[:, 0] - normalizer

    def shown(most_likely: Array) -> Array:
        return transforms.logprob_token_ids(options["logprob_token_ids"], state["logprob_ids"], most_likely)

    return Sampled(token_ids, chosen, *_top(logits, normalizer, num_top_logprobs, shown))


def score(logits: Float[Array, "B V"], token_ids: Int[Array, "B"], num_top_logprobs: Int[Array, ""]) -> Scored:
    """Log-probabilities of given tokens, and how many tokens are more likely; the tops only if any are wanted."""
    normalizer = _normalizer(logits)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], 1)
    ranks = (logits > chosen).sum(-1, dtype=jnp.int32) + 1
    return Scored(chosen[:, 0] - normalizer, ranks, *_top(logits, normalizer, num_top_logprobs, lambda ids: ids))


def _top(
    logits: Float[Array, "B V"],
    normalizer: Float[Array, "B"],
    num_top_logprobs: Int[Array, ""],
    shown: Callable[[Array], Array],
) -> tuple[Int[Array, "B 20"], Float[Array, "B 20"]]:
    """What is `shown` instead of the most likely tokens, and their log-probabilities; no meaning if none are wanted."""

    def top() -> tuple[Array, Array]:
        _, likely = top_k(logits, MAX_TOP_LOGPROBS)
        is_missing = jnp.arange(MAX_TOP_LOGPROBS) >= likely.shape[1]  # in a vocabulary of fewer than 20 tokens
        ids = shown(jnp.pad(likely, ((0, 0), (0, MAX_TOP_LOGPROBS - likely.shape[1]))))
        values = jnp.take_along_axis(logits, ids, 1) - normalizer[:, None]
        return ids, jnp.where(is_missing, -jnp.inf, values)

    shape = (logits.shape[0], MAX_TOP_LOGPROBS)
    return jax.lax.cond(  # type: ignore[no-any-return]
        num_top_logprobs > 0, top, lambda: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
    )


def _draw(scaled: Float[Array, "B V"], options: Mapping[str, Array], positions: Int[Array, "B"]) -> Int[Array, "B"]:
    """Sample from softmax(scaled) restricted by top_k, then top_p, and min_p."""
    restricts = (options["top_k"] > 0) | (options["top_p"] < 1) | (options["min_p"] > 0)
    restricts &= options["temperature"] > 0  # padding rows are greedy

    def threshold() -> Array:
        rows = transforms.candidates(scaled)
        kept = transforms.top_k(rows, options["top_k"])
        kept = transforms.top_p(rows, options["top_p"], kept)
        return jnp.maximum(kept, transforms.min_p(rows, options["min_p"]))

    lowest = jax.lax.cond(restricts.any(), threshold, lambda: jnp.full(scaled.shape[0], -jnp.inf))
    weights = jnp.where(scaled >= lowest[:, None], jnp.exp(scaled - scaled.max(-1, keepdims=True)), 0.0)
    return _categorical(weights, transforms.seed(options["seed"], positions))


def _most_likely(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """Ties go to the lowest id."""
    return _first_where(logits == logits.max(-1, keepdims=True))


def _normalizer(logits: Float[Array, "B V"]) -> Float[Array, "B"]:
    """What turns logits into log-probabilities when it is taken off."""
    best = logits.max(-1)
    return best + jnp.log(jnp.exp(logits - best[:, None]).sum(-1))


def _categorical(weights: Float[Array, "B V"], uniform: Float[Array, "2 B"]) -> Int[Array, "B"]:
    """Draw by inverse transform in two stages: a chunk by its mass, then a token within it.

    Two independent draws keep both stages exact to float32 and cost two uniforms a row instead of
    one per token.
    """
    chunks = chunked(weights, 0.0)  # (B, C, X)
    chunk = _inverse(chunks.sum(-1), uniform[0])
    inside = jnp.take_along_axis(chunks, chunk[:, None, None], 1)[:, 0]  # (B, X)
    return chunk * CHUNK + _inverse(inside, uniform[1])


def _inverse(weights: Float[Array, "B X"], uniform: Float[Array, "B"]) -> Int[Array, "B"]:
    """The first entry whose cumulative weight exceeds `uniform` of the total; never one of weight zero."""
    cumulative = jnp.cumsum(weights, -1)
    above = (cumulative > (uniform * cumulative[:, -1])[:, None]) & (weights > 0)
    # Rounding can leave none above for a draw next to 1: then the last entry with weight is meant.
    last = weights.shape[1] - 1 - _first_where(weights[:, ::-1] > 0)
    return jnp.where(above.any(-1), _first_where(above), last)


def _first_where(mask: Array) -> Int[Array, "B"]:
    """Index of the first True of each row, by a minimum: half the cost of argmax on a CPU at 32 rows."""
    index = jnp.arange(mask.shape[1], dtype=jnp.int32)
    return jnp.minimum(jnp.where(mask, index, mask.shape[1]).min(-1), mask.shape[1] - 1)
