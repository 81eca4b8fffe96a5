"""A router that is an MLP with a state from layer to layer, and may choose no expert (ZAYA1, arXiv 2511.17127)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.backend import NATIVE
from jaxtyping import Array, Float

from jaxserve.layers.linear import Linear, Tokens
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.routing import Routing, softmax, sorted_by_expert
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.experts import ExpertsConfig


class MLPRouter(nnx.Module):
    """Compute r = down(x) + factors * (r of the layer before), and score the experts, and none of them, by an MLP of r.

    A bias is added to the scores that choose, though not to the weight.
    """

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig, policy: DtypePolicy) -> None:
        width, plain = experts.router_width, policy.unquantized
        assert width is not None, "a router with a width"
        self.down_proj = Linear(width, config.hidden_size, (None, "embed"), plain, bias=True)
        has_state = experts.has_router_state
        self.router_states_scale = parameter((width,), (None,), policy.vectors) if has_state else None
        self.router_mlp = RouterMLP(width, experts.num_experts + 1, config.norm_eps, plain)
        self.balancing_biases = parameter((experts.num_experts + 1,), (None,), jnp.dtype(jnp.float32))
        self.num_experts, self.is_alike = experts.num_experts, policy.backend in NATIVE

    def route(
        self, x: Float[Array, "T D"], tokens: Tokens, before: Float[Array, "T R"] | None
    ) -> tuple[Routing, Float[Array, "T R"]]:
        """Choose the expert of every token, `num_experts` for none. Returns r as well. before: that of the layer before."""
        state = self.down_proj(x, tokens)
        if self.router_states_scale is not None and before is not None:
            state = state + before * self.router_states_scale[...]
        scores = softmax(self.router_mlp(state, tokens).astype(jnp.float32), is_alike=self.is_alike)
        experts = jnp.argmax(scores + self.balancing_biases[...], -1, keepdims=True)
        weights = jnp.take_along_axis(scores, experts, 1)
        is_padding = jnp.arange(len(x))[:, None] >= tokens.num_real
        experts = jnp.where(is_padding, self.num_experts, experts)
        routing = sorted_by_expert(experts, jnp.where(experts < self.num_experts, weights, 0), self.num_experts)
        return routing._replace(adapters=tokens.adapters), state


class RouterMLP(nnx.Module):
    """RMSNorm, two matmuls with biases and GELU, and the matmul that scores."""

    def __init__(self, width: int, num_scores: int, eps: float, policy: DtypePolicy) -> None:
        self.norm = RMSNorm(width, eps, policy)
        self.fc1 = Linear(width, width, (None, None), policy, bias=True)
        self.fc2 = Linear(width, width, (None, None), policy, bias=True)
        self.out_proj = Linear(num_scores, width, (None, None), policy)

    def __call__(self, x: Float[Array, "T R"], tokens: Tokens) -> Float[Array, "T E1"]:
        hidden = self.norm(x)
        for matmul in (self.fc1, self.fc2):
            hidden = jax.nn.gelu(matmul(hidden, tokens), approximate=False)
        return self.out_proj(hidden, tokens)
