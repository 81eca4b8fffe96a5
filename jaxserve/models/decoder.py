"""THE decoder: every family is a `DecoderConfig` over this one forward function.

Attribute names are Hugging Face's checkpoint names, so a parameter's path is the name it is loaded by.
Forward never mutates: the KV pool is an argument and a result.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import Attention, KVPool, StepContext
from jaxserve.layers.embed import Embedding
from jaxserve.layers.mlp import MLP
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.numerics import Numerics
from jaxserve.models.config import DecoderConfig, LayerConfig


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, numerics: Numerics) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, numerics)
        self.self_attn = Attention(config, layer, numerics)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, numerics)
        self.mlp = MLP(config, numerics)

    def __call__(
        self, x: Float[Array, "T D"], pool: KVPool, index: Int[Array, ""], step: StepContext
    ) -> tuple[Float[Array, "T D"], KVPool]:
        with jax.named_scope("attention"):
            attended, pool = self.self_attn(self.input_layernorm(x), pool, index, step)
        x = x + attended
        with jax.named_scope("mlp"):
            return x + self.mlp(self.post_attention_layernorm(x), step.num_tokens), pool


class DecoderStack(nnx.Module):
    """Embedding, layers, final norm: the checkpoint's `model.` prefix."""

    def __init__(self, config: DecoderConfig, numerics: Numerics) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, numerics)
        self.layers = nnx.List([DecoderLayer(config, layer, numerics) for layer in config.layers])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, numerics)


class Decoder(nnx.Module):
    """A decoder-only language model."""

    def __init__(self, config: DecoderConfig, numerics: Numerics) -> None:
        self.model = DecoderStack(config, numerics)
        self.lm_head = None if config.tied_embeddings else Embedding(config.vocab_size, config.hidden_size, numerics)

    def hidden(self, token_ids: Int[Array, "T"], pool: KVPool, step: StepContext) -> tuple[Float[Array, "T D"], KVPool]:
        """Final-norm outputs of every token; writes their keys and values into the pool."""
        with jax.named_scope("embed"):
            x = self.model.embed_tokens(token_ids)  # (T, D)
        for index, layer in enumerate(self.model.layers):
            with jax.named_scope(f"layer_{index}"):
                x, pool = _call_layer(layer, x, pool, jnp.int32(index), step)
        return self.model.norm(x), pool

    def logits(self, hidden: Float[Array, "B D"], num_rows: Int[Array, ""]) -> Float[Array, "B V"]:
        """Scores over the vocabulary, float32; rows behind `num_rows` are padding."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        with jax.named_scope("head"):
            return head.logits(hidden, num_rows)


def _call_layer(
    layer: DecoderLayer, x: Float[Array, "T D"], pool: KVPool, index: Int[Array, ""], step: StepContext
) -> tuple[Float[Array, "T D"], KVPool]:
    return layer(x, pool, index, step)
