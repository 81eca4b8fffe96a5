"""The gated feed-forward block (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import Linear
from jaxserve.layers.numerics import Numerics
from jaxserve.models.config import Activation, DecoderConfig


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def _gelu_tanh(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, numerics: Numerics) -> None:
        d, f, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(f, d, ("ffn", "embed"), numerics, bias=bias)
        self.up_proj = Linear(f, d, ("ffn", "embed"), numerics, bias=bias)
        self.down_proj = Linear(d, f, ("embed", "ffn"), numerics, bias=bias)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "T D"], num_tokens: Int[Array, ""]) -> Float[Array, "T D"]:
        gate = ACTIVATIONS[self.activation](self.gate_proj(x, num_tokens))  # (T, F)
        return self.down_proj(gate * self.up_proj(x, num_tokens), num_tokens)
