"""The feed-forward block, gated (Shazeer, arXiv 2002.05202) or with an activation alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import NormalDist

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.backend import NATIVE
from jaxtyping import Array, Float

from jaxserve.layers.fused import FusedLinear
from jaxserve.layers.linear import Linear, Tokens
from jaxserve.layers.norm import means, norm_of
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.activation import Activation
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.experts import ClampedGate


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def _gelu_tanh(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


def _quick_gelu(x: Array) -> Array:
    return x * jax.nn.sigmoid(1.702 * x)


def _relu2(x: Array) -> Array:
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": jax.nn.relu,
    "relu2": _relu2,
}


def clamped(gate: Array, up: Array, clamp: ClampedGate) -> Array:
    """Return the product that `ClampedGate` describes."""
    gate, up = jnp.minimum(gate, clamp.limit), jnp.clip(up, -clamp.limit, clamp.limit)
    return gate * jax.nn.sigmoid(clamp.slope * gate) * (up + clamp.offset if clamp.offset else up)


def gated(activated: Array, up: Array, limit: float | None) -> Array:
    """Return the product of an activated gate and the other input, within the bound of `LayerConfig.mlp_limit`."""
    return activated * up if limit is None else jnp.minimum(activated, limit) * jnp.clip(up, -limit, limit)


class XIELU(nnx.Module):
    """xIELU (arXiv 2411.13010): alpha_p x^2 + beta x above zero, alpha_n (e^x - 1 - x) + beta x below, with learned alphas."""

    def __init__(self, policy: DtypePolicy) -> None:
        self.alpha_p, self.alpha_n, self.beta, self.eps = (parameter((1,), (None,), policy.vectors) for _ in range(4))

    def __call__(self, x: Float[Array, "T F"]) -> Float[Array, "T F"]:
        wide = x.astype(jnp.float32)
        alpha_p, alpha_n, beta, eps = (
            each[...].astype(jnp.float32) for each in (self.alpha_p, self.alpha_n, self.beta, self.eps)
        )
        above = jax.nn.softplus(alpha_p) * wide * wide
        below = (jax.nn.softplus(alpha_n) + beta) * (jnp.expm1(jnp.minimum(wide, eps)) - wide)
        return (jnp.where(wide > 0, above, below) + beta * wide).astype(x.dtype)


class MLP(nnx.Module):
    """Compute down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate.

    width: F, by default the config's; axis: its logical axis; sparsity, limit: see `LayerConfig.activation_sparsity` and `mlp_limit`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        policy: DtypePolicy,
        *,
        width: int | None = None,
        axis: str = "ffn",
        sparsity: float = 0.0,
        limit: float | None = None,
    ) -> None:
        d, f, bias = config.hidden_size, width or config.intermediate_size, config.mlp_bias
        parts = {"gate_proj": f, "up_proj": f} if config.mlp_has_gate else {"up_proj": f}
        make = partial(Linear, in_dim=d, axes=(axis, "embed"), policy=policy, bias=bias)
        self.gate_up_proj = FusedLinear(parts, make, policy, num_units=f)
        self.down_proj = Linear(d, f, ("embed", axis), policy, bias=bias)
        self.ffn_sub_norm = norm_of(config.norm_kind, f, config, policy) if config.has_inner_norms else None
        self.activation = config.activation
        self.act_fn = XIELU(policy) if config.activation == "xielu" else None
        self.scales = config.mlp_gate_scale, config.mlp_out_scale
        self.num_deviations = NormalDist().inv_cdf(sparsity) if sparsity else None
        self.is_alike, self.limit, self.clamp = policy.backend in NATIVE, limit, config.mlp_clamp

    def __call__(self, x: Float[Array, "T D"], tokens: Tokens) -> Float[Array, "T D"]:
        gate_scale, out_scale = self.scales
        gate, *up = self.gate_up_proj(x, tokens)  # (T, F) each
        if gate_scale != 1:
            gate = gate * gate_scale
        if self.num_deviations is not None:
            gate = self._above(gate, self.num_deviations)
        if self.clamp is not None:
            inner = clamped(gate, up[0], self.clamp)
        else:
            activated = (self.act_fn or ACTIVATIONS[self.activation])(gate)
            inner = gated(activated, up[0], self.limit) if up else activated
        out = self.down_proj(inner if self.ffn_sub_norm is None else self.ffn_sub_norm(inner), tokens)
        return out if out_scale == 1 else out * out_scale

    def _above(self, gate: Float[Array, "T F"], num_deviations: float) -> Float[Array, "T F"]:
        """Return by how much each number exceeds its token's mean and so many standard deviations; 0 if it does not."""
        wide = gate.astype(jnp.float32)
        centred = wide - means(wide, is_alike=self.is_alike)
        deviation = jnp.sqrt(means(jnp.square(centred), is_alike=self.is_alike))
        return jax.nn.relu(centred - num_deviations * deviation).astype(gate.dtype)
