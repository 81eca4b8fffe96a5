"""The encoder of the BERT family: learned positions or rope, bidirectional attention, a norm after each residual.

Attribute names are Hugging Face's checkpoint names, so a parameter's path is the name it is loaded by.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxserve_kernels.rope import Rotation, rotate
from jaxtyping import Array, Float, Int

from jaxserve.layers.fused import FusedLinear
from jaxserve.layers.linear import Embedding, Linear, Tokens
from jaxserve.layers.mlp import ACTIVATIONS
from jaxserve.layers.norm import LayerNorm
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.rope import plain_rotation
from jaxserve.layers.segment_attention import Texts, attend
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.embedding_head import VectorHead


class Table(nnx.Module):
    """A small learned table, looked up by row."""

    def __init__(self, num_rows: int, dim: int, policy: DtypePolicy) -> None:
        self.weight = parameter((num_rows, dim), (None, "embed"), policy.vectors)

    def __call__(self, rows: Int[Array, "T"]) -> Float[Array, "T D"]:
        return self.weight[...][rows]


class Embeddings(nnx.Module):
    """Compute norm(word + position + token type), without the tables that the model does not have."""

    def __init__(self, config: EncoderConfig, policy: DtypePolicy) -> None:
        self.word_embeddings = Embedding(config.vocab_size, config.hidden_size, policy)
        d = config.hidden_size
        has_positions, num_types = config.rope_theta is None, config.num_token_types
        self.position_embeddings = nnx.data(Table(config.num_positions, d, policy) if has_positions else None)
        self.token_type_embeddings = nnx.data(Table(num_types, d, policy) if num_types else None)
        self.LayerNorm = LayerNorm(config.hidden_size, config.norm_eps, policy)
        self.first_position = config.first_position

    def __call__(
        self, token_ids: Int[Array, "T"], positions: Int[Array, "T"], token_types: Int[Array, "T"]
    ) -> Float[Array, "T D"]:
        x = self.word_embeddings(token_ids)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(positions + self.first_position)
        if self.token_type_embeddings is not None:
            x = x + self.token_type_embeddings(token_types)
        return self.LayerNorm(x)


class Projections(nnx.Module):
    """Query, key and value projections."""

    def __init__(self, config: EncoderConfig, policy: DtypePolicy) -> None:
        d = config.hidden_size
        parts = {"query": d, "key": d, "value": d}
        bias = config.has_attention_bias
        make = partial(Linear, in_dim=d, axes=("kv_heads", "embed"), policy=policy, bias=bias)
        self.qkv = FusedLinear(parts, make, policy, num_units=config.num_heads)


class Output(nnx.Module):
    """Compute norm(residual + dense(x))."""

    def __init__(
        self, config: EncoderConfig, in_dim: int, in_axis: str, policy: DtypePolicy, *, has_bias: bool
    ) -> None:
        self.dense = Linear(config.hidden_size, in_dim, ("embed", in_axis), policy, bias=has_bias)
        self.LayerNorm = LayerNorm(config.hidden_size, config.norm_eps, policy)

    def __call__(self, x: Float[Array, "T I"], residual: Float[Array, "T D"], tokens: Tokens) -> Float[Array, "T D"]:
        return self.LayerNorm(residual + self.dense(x, tokens))


class EncoderStep(NamedTuple):
    """Inputs that all layers of a step share."""

    texts: Texts
    rotation: Rotation | None
    """Rotation of queries and keys; None: there is none."""
    bias: Float[Array, "N R"] | None
    """Bias of scores by head and distance; None: there is none."""

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.texts.num_tokens)


class EncoderAttention(nnx.Module):
    """Attention within each text."""

    def __init__(self, config: EncoderConfig, policy: DtypePolicy) -> None:
        self.self = Projections(config, policy)
        self.output = Output(config, config.hidden_size, "heads", policy, has_bias=config.has_attention_bias)
        self.shape = (-1, config.num_heads, config.head_dim)
        self.backend = policy.backend

    def __call__(self, x: Float[Array, "T D"], step: EncoderStep) -> Float[Array, "T D"]:
        query, key, value = (part.reshape(self.shape) for part in self.self.qkv(x, step.tokens))
        if step.rotation is not None:
            query, key = rotate(query, step.rotation), rotate(key, step.rotation)
        attended = attend(query, key, value, step.texts, bias=step.bias, backend=self.backend)
        return self.output(attended.reshape(x.shape), x, step.tokens)


class Intermediate(nnx.Module):
    """Compute activation(dense(x)), or activation(gate(x)) * up(x)."""

    def __init__(self, config: EncoderConfig, policy: DtypePolicy) -> None:
        d, f, bias = config.hidden_size, config.intermediate_size, config.has_mlp_bias
        make = partial(Linear, in_dim=d, axes=("ffn", "embed"), policy=policy, bias=bias)
        parts = {"gate_proj": f, "up_proj": f} if config.is_gated else {"dense": f}
        self.parts = FusedLinear(parts, make, policy, num_units=f)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "T D"], tokens: Tokens) -> Float[Array, "T F"]:
        gate, *up = self.parts(x, tokens)
        activated = ACTIVATIONS[self.activation](gate)
        return activated * up[0] if up else activated


class EncoderLayer(nnx.Module):
    """Attention, then feed-forward, each with a norm after its residual."""

    def __init__(self, config: EncoderConfig, policy: DtypePolicy) -> None:
        self.attention = EncoderAttention(config, policy)
        self.intermediate = Intermediate(config, policy)
        self.output = Output(config, config.intermediate_size, "ffn", policy, has_bias=config.has_mlp_out_bias)

    def __call__(self, x: Float[Array, "T D"], step: EncoderStep) -> Float[Array, "T D"]:
        with jax.named_scope("attention"):
            x = self.attention(x, step)
        with jax.named_scope("mlp"):
            return self.output(self.intermediate(x, step.tokens), x, step.tokens)


class EncoderStack(nnx.Module):
    """Layers, under the checkpoint's prefix `encoder.`."""

    def __init__(self, config: EncoderConfig, policy: DtypePolicy) -> None:
        self.layer = nnx.List([EncoderLayer(config, policy) for _ in range(config.num_layers)])
        count = config.num_relative_buckets
        self.relative_attention_bias = nnx.data(Table(count, config.num_heads, policy) if count else None)

    def bias(self, longest: int) -> Float[Array, "N R"] | None:
        """Return the bias of scores by head and distance in texts of up to `longest` tokens; None if the model has none."""
        if self.relative_attention_bias is None:
            return None
        buckets = distance_buckets(np.arange(1 - longest, longest), len(self.relative_attention_bias.weight[...]))
        return self.relative_attention_bias(jnp.asarray(buckets)).T.astype(jnp.float32)


def distance_buckets(distances: np.ndarray, count: int) -> np.ndarray:
    """Return the bucket of each distance of a key after its query, as in T5 (arXiv 1910.10683): half of the buckets for either side, of
    which half are for one distance each, and the others grow with its logarithm up to 128."""
    half = count // 2
    exact, size = half // 2, np.abs(distances)
    steps = np.log(np.maximum(size, 1).astype(np.float32) / exact) / math.log(128 / exact) * (half - exact)
    large = np.minimum(exact + steps.astype(np.int32), half - 1)
    found = np.where(distances > 0, half, 0) + np.where(size < exact, size, large)
    return np.asarray(found, np.int32)


class Encoder(nnx.Module):
    """Encoder of texts to one vector per token, and the head after their pooling."""

    def __init__(self, config: EncoderConfig, policy: DtypePolicy) -> None:
        self.embeddings = Embeddings(config, policy)
        self.encoder = EncoderStack(config, policy)
        self.rope = None if config.rope_theta is None else (config.rope_theta, config.head_dim)
        self.head = None if config.head is None else VectorHead(config.head, policy)

    def hidden(
        self, token_ids: Int[Array, "T"], positions: Int[Array, "T"], token_types: Int[Array, "T"], texts: Texts
    ) -> Float[Array, "T D"]:
        """Return the last layer's outputs."""
        with jax.named_scope("embed"):
            x = self.embeddings(token_ids, positions, token_types)
        rotation = None if self.rope is None else plain_rotation(*self.rope, positions)
        step = EncoderStep(texts, rotation, self.encoder.bias(texts.longest))
        for index, layer in enumerate(self.encoder.layer):
            with jax.named_scope(f"layer_{index}"):
                x = layer(x, step)
        return x
