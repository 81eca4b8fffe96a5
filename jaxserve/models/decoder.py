"""THE decoder: every family is a `DecoderConfig` over this one forward function.

Attribute names are Hugging Face's checkpoint names, so a parameter's path is the name it is loaded by.
Forward never mutates: the KV pool is an argument and a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import Attention, KVPool, StepContext
from jaxserve.layers.embed import Embedding
from jaxserve.layers.experts import Experts
from jaxserve.layers.mlp import MLP
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig, NormPlacement

_NORMS: Final[Mapping[NormPlacement, tuple[str | None, str | None, str | None, str | None]]] = {
    "pre": ("input_layernorm", None, "post_attention_layernorm", None),
    "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "sandwich": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""What checkpoints call the norms before and behind attention, before and behind the feed-forward block."""


class DecoderLayer(nnx.Module):
    """x + attention(x), then x + mlp(x) or x + experts(x), with norms before the blocks, behind them, or both."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, policy: DtypePolicy) -> None:
        self.norms = _NORMS[config.norm_placement]
        for name in filter(None, self.norms):
            setattr(self, name, RMSNorm(config.hidden_size, config.norm_eps, policy, config.norm_weights))
        self.self_attn = Attention(config, layer, policy)
        self.mlp = MLP(config, policy) if layer.experts is None else Experts(config, layer.experts, policy)
        self.residual_scale = config.residual_scale

    def __call__(
        self, x: Float[Array, "T D"], pool: KVPool, index: Int[Array, ""], step: StepContext
    ) -> tuple[Float[Array, "T D"], KVPool]:
        before_attention, behind_attention, before_mlp, behind_mlp = map(self._norm, self.norms)
        with jax.named_scope("attention"):
            attended, pool = self.self_attn(before_attention(x), pool, index, step)
        x = x + scaled(behind_attention(attended), self.residual_scale)
        with jax.named_scope("mlp"):
            made = self.mlp(before_mlp(x), step.tokens)
        return x + scaled(behind_mlp(made), self.residual_scale), pool

    def _norm(self, name: str | None) -> Callable[[Array], Array]:
        return (lambda x: x) if name is None else getattr(self, name)


def scaled(x: Array, factor: float) -> Array:
    """x * factor, in the type of x."""
    return x if factor == 1 else x * factor


class DecoderStack(nnx.Module):
    """Embedding, layers, final norm: the checkpoint's `model.` prefix."""

    def __init__(self, config: DecoderConfig, policy: DtypePolicy) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, policy)
        self.layers = nnx.List([DecoderLayer(config, layer, policy) for layer in config.layers])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, policy, config.norm_weights)


class Decoder(nnx.Module):
    """A decoder-only language model."""

    def __init__(self, config: DecoderConfig, policy: DtypePolicy) -> None:
        self.config = config
        self.model = DecoderStack(config, policy)
        self.lm_head = None if config.tied_embeddings else Embedding(config.vocab_size, config.hidden_size, policy)

    def hidden(self, token_ids: Int[Array, "T"], pool: KVPool, step: StepContext) -> tuple[Float[Array, "T D"], KVPool]:
        """Final-norm outputs of every token; writes their keys and values into the pool."""
        with jax.named_scope("embed"):
            x = scaled(self.model.embed_tokens(token_ids), self.config.embedding_scale)  # (T, D)
        for index, layer in enumerate(self.model.layers):
            with jax.named_scope(f"layer_{index}"):
                x, pool = layer(x, pool, jnp.int32(index), step)
        return self.model.norm(x), pool

    def logits(self, hidden: Float[Array, "B D"], num_rows: Int[Array, ""]) -> Float[Array, "B V"]:
        """Scores over the vocabulary, float32; rows behind `num_rows` are padding."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        cap = self.config.logit_softcap
        with jax.named_scope("head"):
            logits = scaled(head.logits(hidden, num_rows), self.config.logit_scale)
            return logits if cap is None else jnp.tanh(logits / cap) * cap
