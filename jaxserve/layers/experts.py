"""The feed-forward block of many experts, of which each token takes a few (Shazeer et al., arXiv 1701.06538).

Rows are tokens once for each expert that they take, sorted by expert: three products with ragged groups serve any mix
of choices, read the weights of no expert that nobody took, and give a row the same result whatever its neighbours.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.grouped_matmul import grouped_matmul
from jaxtyping import Array, Float, Int

from jaxserve.layers.fused import FusedLinear
from jaxserve.layers.linear import Linear, Matrix, Tokens
from jaxserve.layers.mlp import ACTIVATIONS
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.sharding.shard_map import Axes, all_reduce, num_shards, sharded

SPLIT_AXIS = "expert_ffn"
"""What devices share: each has its part of every expert."""


class Routing(NamedTuple):
    """Who takes which experts. R = T * k rows, those of padding tokens behind all others."""

    tokens: Int[Array, "R"]
    """Of each row."""
    group_sizes: Int[Array, "E"]
    """Rows of each expert."""
    rows: Int[Array, "T k"]
    """Of each token's choices, the best first."""
    weights: Float[Array, "T k"]


def route(scores: Float[Array, "T E"], num_tokens: Int[Array, ""], config: ExpertsConfig) -> Routing:
    """Scores behind `num_tokens` are padding."""
    num_choices = config.num_per_token
    best, experts = jax.lax.top_k(scores, num_choices)
    weights = jnp.exp(best - jax.nn.logsumexp(best if config.is_normalized else scores, axis=-1, keepdims=True))
    is_padding = jnp.arange(len(scores)) >= num_tokens
    owners = jnp.where(is_padding[:, None], config.num_experts, experts).reshape(-1)
    order = jnp.argsort(owners, stable=True)
    rows = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True)
    return Routing(
        tokens=order // num_choices,
        group_sizes=(owners[:, None] == jnp.arange(config.num_experts)).sum(0, dtype=jnp.int32),
        rows=rows.reshape(-1, num_choices),
        weights=weights,
    )


class ExpertLinear(Matrix):
    """A matrix for each expert, and perhaps a bias."""

    def __init__(
        self, out_dim: int, in_dim: int, axes: Axes, policy: DtypePolicy, *, num_experts: int, bias: bool
    ) -> None:
        super().__init__(out_dim, in_dim, axes, policy, num_experts=num_experts)
        self.bias = self._declared((out_dim,), axes[:1], policy.vectors) if bias else None

    def __call__(
        self, x: Float[Array, "R I"], group_sizes: Int[Array, "E"], *, num_shards: int = 1
    ) -> Float[Array, "R O"]:
        """x @ weight.T in float32, of each row with its expert's. num_shards: how many such results are added up."""
        y = self._product(x, group_sizes)
        if self.bias is None:
            return y
        experts = jnp.repeat(jnp.arange(len(group_sizes)), group_sizes, total_repeat_length=len(x))
        return y + self.bias[...].astype(jnp.float32)[experts] / num_shards

    def _product(self, x: Float[Array, "R I"], group_sizes: Int[Array, "E"]) -> Float[Array, "R O"]:
        scales = None if self.weight_scale is None else self.weight_scale[...]
        multiply = partial(grouped_matmul, backend=self.policy.backend)
        product = multiply(x, self.weight[...], group_sizes, scales, dynamic=self.policy.is_dynamic)
        if self.weight_offset is None:
            return product
        offsets = self.weight_offset[...].swapaxes(1, 2)  # (E, O, G)
        sums = x.reshape(len(x), offsets.shape[2], -1).astype(jnp.float32).sum(-1)
        return product + multiply(sums, offsets, group_sizes)


class ExpertMLPs(nnx.Module):
    """down(activation(gate(x)) * up(x)) of each expert, or with a `ClampedGate`."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig, policy: DtypePolicy) -> None:
        d, f = config.hidden_size, experts.intermediate_size
        own = partial(ExpertLinear, policy=policy, num_experts=experts.num_experts, bias=experts.has_biases)
        make = partial(own, in_dim=d, axes=(SPLIT_AXIS, "embed"))
        self.gate_up_proj = FusedLinear({"gate_proj": f, "up_proj": f}, make, policy, num_units=f)
        self.down_proj = own(d, f, ("embed", SPLIT_AXIS))
        self.activation, self.clamp = config.activation, experts.clamp

    def __call__(self, x: Float[Array, "T D"], routing: Routing, *, num_shards: int = 1) -> Float[Array, "T D"]:
        """The weighted sums, in float32; a token's choices are added in their order. num_shards: devices whose parts
        of the sums are added up."""
        gate, up = (part.astype(x.dtype) for part in self.gate_up_proj(x[routing.tokens], routing.group_sizes))
        made = self.down_proj(self._gated(gate, up), routing.group_sizes, num_shards=num_shards)  # (R, D)
        return (made[routing.rows] * routing.weights[:, :, None]).sum(1)

    def _gated(self, gate: Float[Array, "R F"], up: Float[Array, "R F"]) -> Float[Array, "R F"]:
        if self.clamp is None:
            return ACTIVATIONS[self.activation](gate) * up
        limit = self.clamp.limit
        gate = jnp.minimum(gate, limit)
        return gate * jax.nn.sigmoid(self.clamp.slope * gate) * (jnp.clip(up, -limit, limit) + 1)


class Experts(nnx.Module):
    """A router, which is never quantised, and its experts."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig, policy: DtypePolicy) -> None:
        whole = replace(policy, quantization="none")
        self.gate = Linear(experts.num_experts, config.hidden_size, (None, "embed"), whole, bias=experts.has_biases)
        self.experts = ExpertMLPs(config, experts, policy)
        self.config, self.split_axes = experts, policy.split_axes

    def __call__(self, x: Float[Array, "T D"], tokens: Tokens) -> Float[Array, "T D"]:
        """Of padding tokens: zeros."""
        with jax.named_scope("route"):
            scores = self.gate.multiply(x, tokens.num_real)
            if self.gate.bias is not None:
                scores = scores + self.gate.bias[...]
            routing = route(scores, tokens.num_real, self.config)
        made = self._on_every_device(x, routing).astype(x.dtype)
        return jnp.where(jnp.arange(len(x))[:, None] < tokens.num_real, made, 0)

    def _on_every_device(self, x: Float[Array, "T D"], routing: Routing) -> Float[Array, "T D"]:
        """By each its part of all experts, and one sum behind them.

        XLA, left to itself, would exchange the sums of every tile of a loop.
        """
        shards = num_shards(SPLIT_AXIS, self.split_axes)
        graph, state = nnx.split(self.experts)
        leaves, treedef = jax.tree.flatten(state)
        axes = [variable.get_metadata()["axes"] for _, variable in nnx.to_flat_state(state)]

        def compute(x: Float[Array, "T D"], routing: Routing, *leaves: Array) -> Float[Array, "T D"]:
            own = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
            made = own(x, routing, num_shards=shards)
            return all_reduce(made, x.dtype) if shards > 1 else made

        operands = [(x, ()), (routing, ()), *zip(leaves, axes, strict=True)]
        return sharded(compute, operands, (), self.split_axes)
