"""Routers of mixture-of-experts blocks: which experts each token uses, and with which weights."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxserve_kernels.backend import NATIVE
from jaxtyping import Array, Bool, Float, Int

from jaxserve.layers.linear import ExpertRows, Linear, Tokens
from jaxserve.layers.norm import normalized
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.experts import ExpertsConfig


class Routing(NamedTuple):
    """Tokens sorted by expert. R = T * k rows; rows of padding tokens come last."""

    tokens: Int[Array, "R"]
    """Token of each row."""
    group_sizes: Int[Array, "E"]
    """Rows of each expert."""
    rows: Int[Array, "T k"]
    """Row of each of a token's experts, the best first."""
    weights: Float[Array, "T k"]
    experts: Int[Array, "T k"]
    """Each token's experts, the best first; for padding tokens E, which is none."""
    adapters: Bool[Array, "T A"] | None = None
    """See `Tokens.adapters`."""

    def sorted_rows(self, tokens: Int[Array, "R2"], group_sizes: Int[Array, "E2"]) -> ExpertRows:
        """Return the sizes and the adapters of rows of these tokens, which are sorted by expert."""
        return ExpertRows(group_sizes, None if self.adapters is None else self.adapters[tokens])


class Router(Linear):
    """Matmul that scores experts; never quantised."""

    def __init__(self, decoder: DecoderConfig, config: ExpertsConfig, policy: DtypePolicy) -> None:
        dim, table = decoder.hidden_size, (decoder.vocab_size, config.num_per_token)
        self.tid2eid = parameter(table, (None, None), jnp.dtype(jnp.int32)) if config.is_hashed else None
        super().__init__(config.num_experts, dim, (None, "embed"), policy.unquantized, bias=config.has_biases)
        has_correction = config.has_correction_bias
        self.e_score_correction_bias = (
            parameter((config.num_experts,), (None,), jnp.dtype(jnp.float32)) if has_correction else None
        )
        has_scales = config.router_norm_eps is not None
        self.scale = parameter((dim,), (None,), policy.vectors) if has_scales else None
        self.per_expert_scale = parameter((config.num_experts,), (None,), policy.vectors) if has_scales else None
        self.is_alike = policy.backend in NATIVE
        self.config = config

    def route(self, x: Float[Array, "T D"], tokens: Tokens) -> Routing:
        """Choose the experts of every token."""
        if self.scale is not None and self.config.router_norm_eps is not None:
            normed = normalized(x, self.config.router_norm_eps, is_alike=self.is_alike).astype(x.dtype)
            x = normed * self.scale[...] * x.shape[-1] ** -0.5
        logits = self.multiply(x, tokens.num_real)
        if self.bias is not None:
            logits = logits + self.bias[...]
        cap = self.config.logit_softcap
        if cap is not None:
            logits = jnp.tanh(logits / cap) * cap
        if self.tid2eid is not None:
            assert tokens.ids is not None, "a router that chooses by tokens"
            hashed = self.tid2eid[...][tokens.ids]
            return routed(hashed, logits, tokens, self.config, is_alike=self.is_alike)
        correction = None if self.e_score_correction_bias is None else self.e_score_correction_bias[...]
        routing = route(logits, tokens.num_real, self.config, correction, is_alike=self.is_alike)
        routing = routing._replace(adapters=tokens.adapters)
        if self.per_expert_scale is None:
            return routing
        factors = self.per_expert_scale[...].astype(jnp.float32)[routing.experts]  # of a padding token: any
        return routing._replace(weights=routing.weights * factors)


def route(
    logits: Float[Array, "T E"],
    num_tokens: Int[Array, ""],
    config: ExpertsConfig,
    correction: Float[Array, "E"] | None = None,
    *,
    is_alike: bool = False,
) -> Routing:
    """Choose the experts of every token; rows of `logits` from `num_tokens` on are padding. is_alike: see `sums`."""
    experts, weights = _choose(logits, config, correction, is_alike=is_alike)
    return _sorted(experts, weights, num_tokens, config.num_experts)


def routed(
    experts: Int[Array, "T k"], logits: Float[Array, "T E"], tokens: Tokens, config: ExpertsConfig, *, is_alike: bool
) -> Routing:
    """Return the routing of every token to experts that are known, with the weights that the router gives them."""
    weights = _weights(_scores(logits, config, is_alike=is_alike), experts, config, is_alike=is_alike)
    return _sorted(experts, weights, tokens.num_real, config.num_experts)._replace(adapters=tokens.adapters)


def _sorted(
    experts: Int[Array, "T k"], weights: Float[Array, "T k"], num_tokens: Int[Array, ""], num_experts: int
) -> Routing:
    is_padding = jnp.arange(len(experts)) >= num_tokens
    return sorted_by_expert(jnp.where(is_padding[:, None], num_experts, experts), weights, num_experts)


def sorted_by_expert(experts: Int[Array, "T k"], weights: Float[Array, "T k"], num_experts: int) -> Routing:
    """Return the routing of tokens to these experts; `num_experts` is none."""
    tokens, rows = sort_rows(experts)
    return Routing(
        tokens=tokens,
        group_sizes=(experts.reshape(-1)[:, None] == jnp.arange(num_experts)).sum(0, dtype=jnp.int32),
        rows=rows,
        weights=weights,
        experts=experts,
    )


def sort_rows(experts: Int[Array, "T k"]) -> tuple[Int[Array, "R"], Int[Array, "T k"]]:
    """Sort the rows of all tokens by expert, then by token. Returns each row's token, and each choice's row."""
    num_choices = experts.shape[1]
    order = jnp.argsort(experts.reshape(-1), stable=True)
    rows = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True)
    return order // num_choices, rows.reshape(-1, num_choices)


def scaled_rows(x: Float[Array, "T D"], routing: Routing) -> Float[Array, "R D"]:
    """Return each row's token, multiplied with the weight of the row's expert."""
    factors = jnp.zeros(len(routing.tokens)).at[routing.rows].set(routing.weights, unique_indices=True)
    return x[routing.tokens] * factors[:, None].astype(x.dtype)


def weighted_sum(
    made: Float[Array, "R D"], rows: Int[Array, "T k"], weights: Float[Array, "T k"], *, is_alike: bool = False
) -> Float[Array, "T D"]:
    """Return each token's weighted sum over its rows, the best expert first. is_alike: see `sums`."""
    return sums(made[rows] * weights[:, :, None], 1, is_alike=is_alike).squeeze(1)


def sums(values: Float[Array, "..."], axis: int, *, is_alike: bool) -> Float[Array, "..."]:
    """Return the sums over an axis, which is kept with one element.

    is_alike: they are added up pair by pair, so that a token's sum does not depend on the number of tokens; XLA:CPU divides a
    reduction by the size of the array.
    """
    if not is_alike:
        return values.sum(axis, keepdims=True)
    while (count := values.shape[axis]) > 1:
        half = count // 2
        added = _part(values, axis, 0, half) + _part(values, axis, half, 2 * half)
        values = jnp.concatenate([added, _part(values, axis, 2 * half, count)], axis) if count % 2 else added
    return values


def _part(values: Float[Array, "..."], axis: int, start: int, end: int) -> Float[Array, "..."]:
    return jax.lax.slice_in_dim(values, start, end, axis=axis)


def softmax(logits: Float[Array, "T E"], *, is_alike: bool) -> Float[Array, "T E"]:
    """Return the softmax of each token's logits. is_alike: see `sums`."""
    if not is_alike:
        return jax.nn.softmax(logits)
    return jnp.exp(logits - _log_sum(logits, is_alike=True))


def _log_sum(logits: Float[Array, "T E"], *, is_alike: bool) -> Float[Array, "T 1"]:
    """Return the logarithms of the sums of e^x."""
    if not is_alike:
        return jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    largest = logits.max(-1, keepdims=True)
    return largest + jnp.log(sums(jnp.exp(logits - largest), -1, is_alike=True))


def _choose(
    logits: Float[Array, "T E"], config: ExpertsConfig, correction: Float[Array, "E"] | None, *, is_alike: bool
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    if config.score == "sparse_mixer":
        return _sparse_mixer(logits, config.margin, is_alike=is_alike)
    if config.score == "softmax" and correction is None and config.num_groups == 1:
        best, experts = jax.lax.top_k(logits, config.num_per_token)
        weights = jnp.exp(best - _log_sum(best if config.is_normalized else logits, is_alike=is_alike))
    else:
        scores = _scores(logits, config, is_alike=is_alike)
        if correction is not None:
            ranks = (logits if config.ranks_by_logits else scores) + correction
        else:  # Large logits have the same sigmoid: without groups, whose scores are added, they are ranked as they are.
            ranks = logits if config.score == "sigmoid" and config.num_groups == 1 else scores
        _, experts = jax.lax.top_k(_within_best_groups(ranks, config, is_alike=is_alike), config.num_per_token)
        return experts, _weights(scores, experts, config, is_alike=is_alike)
    return experts, weights if config.weight_scale == 1 else weights * config.weight_scale


def _scores(logits: Float[Array, "T E"], config: ExpertsConfig, *, is_alike: bool) -> Float[Array, "T E"]:
    if config.score == "sigmoid":
        return jax.nn.sigmoid(logits)
    if config.score == "sqrt_softplus":
        return jnp.sqrt(jax.nn.softplus(logits))
    return softmax(logits, is_alike=is_alike)


def _weights(
    scores: Float[Array, "T E"], experts: Int[Array, "T k"], config: ExpertsConfig, *, is_alike: bool
) -> Float[Array, "T k"]:
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if config.is_normalized:
        weights = weights / (sums(weights, -1, is_alike=is_alike) + 1e-20)  # as DeepSeek-V3 guards it
    return weights if config.weight_scale == 1 else weights * config.weight_scale


def _sparse_mixer(
    logits: Float[Array, "T E"], margin: float, *, is_alike: bool
) -> tuple[Int[Array, "T 2"], Float[Array, "T 2"]]:
    """Choose two experts by SparseMixer (arXiv 2409.12136): one, then another without the first."""
    rows, left = jnp.arange(len(logits)), logits
    experts, weights = [], []
    for _ in range(2):
        expert, best = left.argmax(-1), left.max(-1, keepdims=True)
        is_far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > margin
        weights.append(softmax(jnp.where(is_far, -jnp.inf, left), is_alike=is_alike)[rows, expert])
        experts.append(expert)
        left = left.at[rows, expert].set(-jnp.inf)
    return jnp.stack(experts, 1), jnp.stack(weights, 1)


def _within_best_groups(ranks: Float[Array, "T E"], config: ExpertsConfig, *, is_alike: bool) -> Float[Array, "T E"]:
    """Exclude experts outside each token's best groups, ranked by their best experts (arXiv 2412.19437, 2.1.2)."""
    if config.num_groups == 1:
        return ranks
    grouped = ranks.reshape(len(ranks), config.num_groups, -1)  # (T, groups, E / groups)
    best, _ = jax.lax.top_k(grouped, 2 if config.group_score == "best_two" else 1)
    scores = sums(best, -1, is_alike=is_alike).squeeze(-1)
    _, groups = jax.lax.top_k(scores, config.num_groups_per_token)
    is_chosen = (groups[:, :, None] == jnp.arange(config.num_groups)).any(1)  # (T, groups)
    return jnp.where(is_chosen[:, :, None], grouped, -jnp.inf).reshape(ranks.shape)
