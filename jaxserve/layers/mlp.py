"""The feed-forward block, gated (Shazeer, arXiv 2002.05202) or with an activation alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.layers.fused import FusedLinear
from jaxserve.layers.linear import Linear, Tokens
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.activation import Activation
from jaxserve.model_config.decoder import DecoderConfig


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def _gelu_tanh(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


def _relu2(x: Array) -> Array:
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
}


class MLP(nnx.Module):
    """Compute down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate.

    width: F, by default the config's; axis: its logical axis.
    """

    def __init__(
        self, config: DecoderConfig, policy: DtypePolicy, *, width: int | None = None, axis: str = "ffn"
    ) -> None:
        d, f, bias = config.hidden_size, width or config.intermediate_size, config.mlp_bias
        parts = {"gate_proj": f, "up_proj": f} if config.mlp_has_gate else {"up_proj": f}
        make = partial(Linear, in_dim=d, axes=(axis, "embed"), policy=policy, bias=bias)
        self.gate_up_proj = FusedLinear(parts, make, policy, num_units=f)
        self.down_proj = Linear(d, f, ("embed", axis), policy, bias=bias)
        self.activation = config.activation
        self.scales = config.mlp_gate_scale, config.mlp_out_scale

    def __call__(self, x: Float[Array, "T D"], tokens: Tokens) -> Float[Array, "T D"]:
        gate_scale, out_scale = self.scales
        gate, *up = self.gate_up_proj(x, tokens)  # (T, F) each
        if gate_scale != 1:
            gate = gate * gate_scale
        activated = ACTIVATIONS[self.activation](gate)
        out = self.down_proj(activated * up[0] if up else activated, tokens)
        return out if out_scale == 1 else out * out_scale
