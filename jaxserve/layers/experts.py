"""Mixture-of-experts feed-forward block (Shazeer et al., arXiv 1701.06538).

Every token has one row per expert it uses, and rows are sorted by expert: three grouped matmuls serve any routing,
read no weights of unused experts, and give a row the same result whatever its neighbours.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.expert_parallel import by_all_reduce, by_all_to_all, uses_all_to_all
from jaxserve.layers.fused import FusedLinear
from jaxserve.layers.linear import ExpertLowRank, ExpertRows, Linear, Matrix, Tokens
from jaxserve.layers.mlp import ACTIVATIONS, MLP, clamped, gated
from jaxserve.layers.mlp_router import MLPRouter
from jaxserve.layers.norm import make_norm
from jaxserve.layers.param import array_axes, parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.routing import Router, Routing, scaled_rows, sums, weighted_sum
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.sharding.rules import Axes
from jaxserve.sharding.shard_map import all_reduce, has_mesh, sharded

WIDTH = "expert_ffn"
"""Axis over which devices split each expert."""


class ExpertLinear(Matrix):
    """One matrix per expert, and perhaps a bias."""

    def __init__(
        self, out_dim: int, in_dim: int, axes: Axes, policy: DtypePolicy, *, num_experts: int, bias: bool
    ) -> None:
        super().__init__(out_dim, in_dim, axes, policy, num_experts=num_experts)
        self.bias = parameter((num_experts, out_dim), ("experts", axes[0]), policy.vectors) if bias else None
        self.adapters: ExpertLowRank | None = None

    def adapt(self, num_ranks: int) -> None:
        """Declare the adapters of these matmuls."""
        self.adapters = nnx.data(self.low_rank(self.spec.out_dim, num_ranks))

    def low_rank(self, out_dim: int, num_ranks: int) -> ExpertLowRank:
        """Declare adapters of a part of each expert's outputs."""
        spec = self.spec
        assert spec.num_experts is not None, "a matrix of experts"
        return ExpertLowRank(out_dim, spec.in_dim, spec.axes, self.policy, num_ranks, num_experts=spec.num_experts)

    def with_outputs(self, out_dim: int) -> ExpertLinear:
        """Return matmuls like these with another number of outputs."""
        spec, bias = self.spec, self.bias is not None
        assert spec.num_experts is not None, "a matrix of experts"
        return ExpertLinear(out_dim, spec.in_dim, spec.axes, self.policy, num_experts=spec.num_experts, bias=bias)

    def __call__(self, x: Float[Array, "R I"], rows: ExpertRows, *, num_shards: int = 1) -> Float[Array, "R O"]:
        """Return x @ weight.T of each row's expert, in float32. num_shards: partial results that will be added up."""
        y = self.multiply_groups(x, rows.group_sizes)
        if self.adapters is not None:
            y = y + self.adapters(x, rows)
        if self.bias is None:
            return y
        sizes = rows.group_sizes
        experts = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(x))
        return y + self.bias[...].astype(jnp.float32)[experts] / num_shards


class ExpertMLPs(nnx.Module):
    """Compute down(activation(gate(x)) * up(x)) for each expert, without a gate, or with a `ClampedGate`."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig, policy: DtypePolicy) -> None:
        d, f = experts.latent_size or config.hidden_size, experts.intermediate_size
        parts = {"gate_proj": f, "up_proj": f} if config.mlp_has_gate else {"up_proj": f}
        own = partial(ExpertLinear, policy=policy, num_experts=experts.num_experts, bias=experts.has_biases)
        make = partial(own, in_dim=d, axes=(WIDTH, "embed"))
        self.gate_up_proj = FusedLinear(parts, make, policy, num_units=f)
        self.down_proj = own(d, f, ("embed", WIDTH))
        self.activation, self.clamp, self.limit = config.activation, experts.clamp, experts.limit

    def __call__(self, x: Float[Array, "R D"], rows: ExpertRows, *, num_shards: int = 1) -> Float[Array, "R D"]:
        """Return the outputs of rows sorted by expert, in float32. num_shards: devices whose partial sums are added up."""
        parts = [part.astype(x.dtype) for part in self.gate_up_proj(x, rows)]
        return self.down_proj(self._activated(*parts), rows, num_shards=num_shards)

    def _activated(self, gate: Float[Array, "R F"], up: Float[Array, "R F"] | None = None) -> Float[Array, "R F"]:
        """Return the activation of the gate times up; without a gate, that of the only projection."""
        if up is None:
            return ACTIVATIONS[self.activation](gate)
        if self.clamp is None:
            return gated(ACTIVATIONS[self.activation](gate), up, self.limit)
        return clamped(gate, up, self.clamp)


class Mixture(NamedTuple):
    """The results of a block with experts."""

    output: Float[Array, "T D"]
    experts: Int[Array, "T k"]
    """Each token's experts (`Routing.experts`)."""
    state: Float[Array, "T R"] | None = None
    """The state of the router for that of the next layer; None: it has none."""


class Experts(nnx.Module):
    """A router, its experts, and perhaps a shared expert that every token uses."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig, policy: DtypePolicy) -> None:
        has_mlp = experts.router_width is not None
        self.gate = MLPRouter(config, experts, policy) if has_mlp else Router(config, experts, policy)
        self.experts = ExpertMLPs(config, experts, policy)
        width = experts.shared_intermediate_size
        limit = experts.shared_limit
        self.shared_experts = (
            None if width is None else MLP(config, policy, width=width, axis="shared_ffn", limit=limit)
        )
        self.shared_expert_gate = (
            Linear(1, config.hidden_size, (None, "embed"), policy.unquantized) if experts.has_shared_gate else None
        )
        d, inner = config.hidden_size, experts.latent_size
        self.fc1_latent_proj = None if inner is None else Linear(inner, d, (None, "embed"), policy)
        self.fc2_latent_proj = None if inner is None else Linear(d, inner, ("embed", None), policy)
        self.scales_inputs, self.sum_scale = experts.scales_inputs, experts.sum_scale
        self.rules, self.exchange = policy.rules, policy.exchange

    def __call__(
        self,
        x: Float[Array, "T D"],
        tokens: Tokens,
        routed: Float[Array, "T D"] | None = None,
        before: Float[Array, "T R"] | None = None,
    ) -> Mixture:
        """Return the block's output, zeros for padding tokens.

        routed: the router's input; None: x. before: the state of the router of the layer before.
        """
        state = None
        with jax.named_scope("route"):
            if isinstance(self.gate, MLPRouter):
                routing, state = self.gate.route(x if routed is None else routed, tokens, before)
            else:
                routing = self.gate.route(x if routed is None else routed, tokens)
        made = self._sharded(x if self.fc1_latent_proj is None else self.fc1_latent_proj(x, tokens), routing)
        if self.fc2_latent_proj is not None:
            made = self.fc2_latent_proj(made.astype(x.dtype), tokens).astype(jnp.float32)
        if self.shared_experts is not None:
            with jax.named_scope("shared_experts"):
                made = made + self._shared(self.shared_experts, x, tokens)
        if self.sum_scale != 1:
            made = made * self.sum_scale
        is_routed = jnp.arange(len(x)) < tokens.num_real
        if state is not None:  # a real token may have no expert
            is_routed &= (routing.weights > 0).any(-1)
        return Mixture(jnp.where(is_routed[:, None], made.astype(x.dtype), 0), routing.experts, state)

    def _shared(self, mlp: MLP, x: Float[Array, "T D"], tokens: Tokens) -> Float[Array, "T D"]:
        made = mlp(x, tokens).astype(jnp.float32)
        if self.shared_expert_gate is None:
            return made
        return made * jax.nn.sigmoid(self.shared_expert_gate.multiply(x, tokens.num_real))

    def _sharded(self, x: Float[Array, "T D"], routing: Routing) -> Float[Array, "T D"]:
        """Compute every device's part of all experts, or of its own, then one exchange: XLA would exchange every tile of
        a loop."""
        graph, state = nnx.split(self.experts)
        leaves, treedef = jax.tree.flatten(state)
        axes = [axes for _, variable in nnx.to_flat_state(state) for axes in array_axes(variable)]

        def compute(x: Float[Array, "T D"], routing: Routing, *leaves: Array) -> Float[Array, "T D"]:
            return self._exchanged(nnx.merge(graph, jax.tree.unflatten(treedef, leaves)), x, routing)

        operands = [(x, ()), (routing, ()), *zip(leaves, axes, strict=True)]
        return sharded(compute, operands, (), self.rules)

    def _exchanged(self, mlps: ExpertMLPs, x: Float[Array, "T D"], routing: Routing) -> Float[Array, "T D"]:
        """Return the weighted sums of all tokens, on every device; `mlps` are those of this device."""
        groups, widths = self.rules.mesh_axes("experts"), self.rules.mesh_axes(WIDTH)
        if not has_mesh():
            groups = widths = ()
        compute = partial(mlps, num_shards=self.rules.count(WIDTH) if widths else 1)
        every = routing.sorted_rows(routing.tokens, routing.group_sizes)
        if self.scales_inputs:
            assert not groups, "experts whose inputs are scaled are not split by expert"
            rows = compute(scaled_rows(x, routing), every)[routing.rows]
            made = sums(rows, 1, is_alike=self.gate.is_alike).squeeze(1)
            return all_reduce(made, x.dtype, widths) if widths else made
        if not groups:
            rows = compute(x[routing.tokens], every)
            made = weighted_sum(rows, routing.rows, routing.weights, is_alike=self.gate.is_alike)
            return all_reduce(made, x.dtype, widths) if widths else made
        if not uses_all_to_all(self.exchange, len(x), routing.experts.shape[1], self.rules.count("experts")):
            return all_reduce(by_all_reduce(compute, x, routing, groups), x.dtype, groups + widths)
        made = by_all_to_all(compute, x, routing, groups)
        made = (all_reduce(made, x.dtype, widths) if widths else made).astype(x.dtype)
        gathered: Array = jax.lax.all_gather(made, groups, tiled=True)
        return gathered.astype(jnp.float32)


class DenseAndExperts(nnx.Module):
    """Compute norm(mlp(norm(x))) + norm(experts(norm(x))) with four norms; the router reads x itself."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig, policy: DtypePolicy) -> None:
        self.dense = MLP(config, policy)
        self.sparse = Experts(config, experts, policy)
        self.pre_dense, self.post_dense, self.pre_sparse, self.post_sparse = (
            make_norm(config, policy) for _ in range(4)
        )

    def __call__(self, x: Float[Array, "T D"], tokens: Tokens, *, before: Float[Array, "T R"] | None = None) -> Mixture:
        """Return what `Experts` returns."""
        dense = self.post_dense(self.dense(self.pre_dense(x), tokens))
        made = self.sparse(self.pre_sparse(x), tokens, x, before)
        return made._replace(output=dense + self.post_sparse(made.output))
