"""Embeddings of each token that every layer gets beside the residual stream (Gemma 3n, Gemma 4).

A second table has P numbers per token and layer. Every layer gates its own with its output, and adds what a projection
makes of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import Embedding, Linear, Tokens
from jaxserve.layers.mlp import ACTIVATIONS
from jaxserve.layers.norm import RMSNorm, make_norm
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.decoder import DecoderConfig


class PerLayerInputs(nnx.Module):
    """Compute (table[token] * sqrt(P) + norm(projection(x) / sqrt(D))) / sqrt(2), or without a table the norm, P numbers for each layer."""

    def __init__(self, config: DecoderConfig, dim: int, policy: DtypePolicy) -> None:
        width = config.num_layers * dim
        self.vocab_size = config.per_layer_vocab_size
        table = Embedding(self.vocab_size or config.vocab_size, width, policy) if config.has_per_layer_table else None
        self.embed_tokens = nnx.data(table)
        self.projection = Linear(width, config.hidden_size, (None, "embed"), policy)
        self.norm = RMSNorm(dim, config.norm_eps, policy, config.norm_weights)
        self.shape = (config.num_layers, dim)
        self.scale = config.hidden_size**-0.5

    def __call__(self, token_ids: Int[Array, "T"], x: Float[Array, "T D"], tokens: Tokens) -> Float[Array, "T L P"]:
        """Return the inputs of all layers; x: the embeddings of the tokens."""
        shape = (-1, *self.shape)
        if self.vocab_size is not None:
            token_ids = jnp.where(token_ids < self.vocab_size, token_ids, 0)
        projected = self.norm((self.projection(x, tokens) * self.scale).reshape(shape))
        if self.embed_tokens is None:
            return projected
        own = (self.embed_tokens(token_ids) * self.shape[1] ** 0.5).reshape(shape)
        made: Array = (projected + own) * 2**-0.5
        return made


class PerLayerBlock(nnx.Module):
    """Compute norm(projection(activation(gate(x)) * own)) of a layer's output x and its own inputs."""

    def __init__(self, config: DecoderConfig, dim: int, policy: DtypePolicy) -> None:
        self.gate = Linear(dim, config.hidden_size, (None, "embed"), policy)
        self.projection = Linear(config.hidden_size, dim, ("embed", None), policy)
        self.norm = make_norm(config, policy)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "T D"], own: Float[Array, "T P"], tokens: Tokens) -> Float[Array, "T D"]:
        """Return what is added to x."""
        with jax.named_scope("per_layer"):
            gated = ACTIVATIONS[self.activation](self.gate(x, tokens)) * own
            made: Array = self.norm(self.projection(gated, tokens))
            return made
