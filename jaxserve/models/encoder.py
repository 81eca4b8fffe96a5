"""The encoder of the BERT family: learned positions, bidirectional attention, a norm after each residual.

Attribute names are Hugging Face's checkpoint names, so a parameter's path is the name it is loaded by.
"""

from __future__ import annotations

from functools import partial

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.fused import FusedLinear
from jaxserve.layers.linear import Embedding, Linear, Tokens
from jaxserve.layers.mlp import ACTIVATIONS
from jaxserve.layers.norm import LayerNorm
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
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
    """Compute norm(word + position + token type)."""

    def __init__(self, config: EncoderConfig, policy: DtypePolicy) -> None:
        self.word_embeddings = Embedding(config.vocab_size, config.hidden_size, policy)
        self.position_embeddings = Table(config.num_positions, config.hidden_size, policy)
        self.token_type_embeddings = Table(config.num_token_types, config.hidden_size, policy)
        self.LayerNorm = LayerNorm(config.hidden_size, config.norm_eps, policy)
        self.first_position = config.first_position

    def __call__(
        self, token_ids: Int[Array, "T"], positions: Int[Array, "T"], token_types: Int[Array, "T"]
    ) -> Float[Array, "T D"]:
        position = self.position_embeddings(positions + self.first_position)
        return self.LayerNorm(self.word_embeddings(token_ids) + position + self.token_type_embeddings(token_types))


class Projections(nnx.Module):
    """Query, key and value projections, all with a bias."""

    def __init__(self, config: EncoderConfig, policy: DtypePolicy) -> None:
        d = config.hidden_size
        parts = {"query": d, "key": d, "value": d}
        make = partial(Linear, in_dim=d, axes=("kv_heads", "embed"), policy=policy, bias=True)
        self.qkv = FusedLinear(parts, make, policy, num_units=config.num_heads)


class Output(nnx.Module):
    """Compute norm(residual + dense(x))."""

    def __init__(self, config: EncoderConfig, in_dim: int, in_axis: str, policy: DtypePolicy) -> None:
        self.dense = Linear(config.hidden_size, in_dim, ("embed", in_axis), policy, bias=True)
        self.LayerNorm = LayerNorm(config.hidden_size, config.norm_eps, policy)

    def __call__(self, x: Float[Array, "T I"], residual: Float[Array, "T D"], tokens: Tokens) -> Float[Array, "T D"]:
        return self.LayerNorm(residual + self.dense(x, tokens))


class EncoderAttention(nnx.Module):
    """Attention within each text."""

    def __init__(self, config: EncoderConfig, policy: DtypePolicy) -> None:
        self.self = Projections(config, policy)
        self.output = Output(config, config.hidden_size, "heads", policy)
        self.shape = (-1, config.num_heads, config.head_dim)
        self.backend = policy.backend

    def __call__(self, x: Float[Array, "T D"], texts: Texts) -> Float[Array, "T D"]:
        query, key, value = (part.reshape(self.shape) for part in self.self.qkv(x, Tokens(texts.num_tokens)))
        return self.output(
            attend(query, key, value, texts, backend=self.backend).reshape(x.shape), x, Tokens(texts.num_tokens)
        )


class Intermediate(nnx.Module):
    """Compute activation(dense(x))."""

    def __init__(self, config: EncoderConfig, policy: DtypePolicy) -> None:
        self.dense = Linear(config.intermediate_size, config.hidden_size, ("ffn", "embed"), policy, bias=True)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "T D"], tokens: Tokens) -> Float[Array, "T F"]:
        return ACTIVATIONS[self.activation](self.dense(x, tokens))


class EncoderLayer(nnx.Module):
    """Attention, then feed-forward, each with a norm after its residual."""

    def __init__(self, config: EncoderConfig, policy: DtypePolicy) -> None:
        self.attention = EncoderAttention(config, policy)
        self.intermediate = Intermediate(config, policy)
        self.output = Output(config, config.intermediate_size, "ffn", policy)

    def __call__(self, x: Float[Array, "T D"], texts: Texts) -> Float[Array, "T D"]:
        with jax.named_scope("attention"):
            x = self.attention(x, texts)
        with jax.named_scope("mlp"):
            return self.output(self.intermediate(x, Tokens(texts.num_tokens)), x, Tokens(texts.num_tokens))


class EncoderStack(nnx.Module):
    """Layers, under the checkpoint's prefix `encoder.`."""

    def __init__(self, config: EncoderConfig, policy: DtypePolicy) -> None:
        self.layer = nnx.List([EncoderLayer(config, policy) for _ in range(config.num_layers)])


class Encoder(nnx.Module):
    """Encoder of texts to one vector per token, and the head after their pooling."""

    def __init__(self, config: EncoderConfig, policy: DtypePolicy) -> None:
        self.embeddings = Embeddings(config, policy)
        self.encoder = EncoderStack(config, policy)
        self.head = None if config.head is None else VectorHead(config.head, policy)

    def hidden(
        self, token_ids: Int[Array, "T"], positions: Int[Array, "T"], token_types: Int[Array, "T"], texts: Texts
    ) -> Float[Array, "T D"]:
        """Return the last layer's outputs."""
        with jax.named_scope("embed"):
            x = self.embeddings(token_ids, positions, token_types)
        for index, layer in enumerate(self.encoder.layer):
            with jax.named_scope(f"layer_{index}"):
                x = layer(x, texts)
        return x
