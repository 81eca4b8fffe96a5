"""Head of a model that embeds, scores or classifies: matmuls after the pooling of a text's token vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.layers.linear import Linear, Tokens
from jaxserve.layers.mlp import ACTIVATIONS
from jaxserve.layers.norm import LayerNorm
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.embedding_head import EmbeddingHead, HeadActivation, HeadLayer

_OTHERS: Final[Mapping[HeadActivation, Callable[[Array], Array]]] = {"tanh": jnp.tanh, "none": lambda x: x}
"""Activations that only heads have."""


def _activation(name: HeadActivation) -> Callable[[Array], Array]:
    return _OTHERS[name] if name == "tanh" or name == "none" else ACTIVATIONS[name]


class DenseLayer(nnx.Module):
    """Compute norm(activation(dense(x))). Quantisation leaves the weights as they are: there are few."""

    def __init__(self, config: HeadLayer, policy: DtypePolicy) -> None:
        self.dense = Linear(config.out_dim, config.in_dim, (None, "embed"), policy.unquantized, bias=config.has_bias)
        self.activation = config.activation
        has_bias = config.norm_has_bias
        norm = None if config.norm is None else LayerNorm(config.out_dim, config.norm_eps, policy, has_bias=has_bias)
        self.norm = nnx.data(norm)

    def __call__(self, x: Float[Array, "B I"]) -> Float[Array, "B O"]:
        made = _activation(self.activation)(self.dense(x, Tokens(jnp.int32(len(x)))))
        return made if self.norm is None else self.norm(made)


class VectorHead(nnx.Module):
    """Layers after pooling."""

    def __init__(self, config: EmbeddingHead, policy: DtypePolicy) -> None:
        self.layers = nnx.List([DenseLayer(layer, policy) for layer in config.layers])
        self.dtype = policy.activations

    def __call__(self, vectors: Float[Array, "B I"]) -> Float[Array, "B O"]:
        """Return the texts' vectors, or logits of their labels, in float32."""
        x = vectors.astype(self.dtype)
        for layer in self.layers:
            x = layer(x)
        return x.astype(jnp.float32)
