"""An EAGLE-3 head of a decoder: it predicts the token after the next one.

For a token t and the token u that follows it, the head takes the model's residual stream at t before several of its layers, and
the embedding e of u, and computes

    h = fc([inputs of the tapped layers at t])
    x = layer([input_layernorm(e), hidden_norm(h)]), added to h
    logits of the token after u = lm_head(norm(x)), of the head's own vocabulary

with one decoder layer that has keys and values of its own. For further tokens x takes the place of h, and the token that the head
has predicted that of u. The place of the entry in the cache is that of t.

Source: EAGLE-3 (Li et al., arXiv 2503.01840), and its published heads.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import Attention, StepContext
from jaxserve.layers.cache import Cache
from jaxserve.layers.linear import Embedding, Linear, Tokens
from jaxserve.layers.mlp import MLP
from jaxserve.layers.norm import RMSNorm, make_norm
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.cache import LayerPlaces
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.predictor import EagleConfig
from jaxserve.models.decoder import Decoder


class EagleLayer(nnx.Module):
    """A decoder layer whose attention reads an embedding and a hidden state side by side."""

    def __init__(self, config: DecoderConfig, eagle: EagleConfig, policy: DtypePolicy) -> None:
        (layer,) = config.layers
        self.input_layernorm = make_norm(config, policy)
        self.hidden_norm = make_norm(config, policy)
        self.self_attn = Attention(config, layer, policy, in_dim=2 * config.hidden_size)
        self.post_attention_layernorm = make_norm(config, policy)
        self.mlp = MLP(config, policy)
        self.norm_before_residual = eagle.norm_before_residual

    def __call__(
        self,
        embeddings: Float[Array, "T D"],
        hidden: Float[Array, "T D"],
        cache: Cache,
        places: LayerPlaces,
        step: StepContext,
    ) -> tuple[Float[Array, "T D"], Cache]:
        normed = self.hidden_norm(hidden)
        both = jnp.concatenate([self.input_layernorm(embeddings), normed], -1)
        made, cache = self.self_attn(both, cache, places, step)
        x = (normed if self.norm_before_residual else hidden) + made
        return x + self.mlp(self.post_attention_layernorm(x), step.tokens), cache


class EagleStack(nnx.Module):
    """Projection, one layer, output norm: the prefix `model.` of `checkpoint.drafters.eagle`."""

    def __init__(self, config: DecoderConfig, eagle: EagleConfig, policy: DtypePolicy) -> None:
        dim, width, count = config.hidden_size, eagle.hidden_size, eagle.num_tapped
        self.embed_tokens = Embedding(eagle.vocab_size, dim, policy) if eagle.has_own_embedding else None
        make = partial(RMSNorm, eps=config.norm_eps, policy=policy)
        self.input_norm = make(count * width) if eagle.tapped_norm == "all" else None
        self.fc_norm = nnx.List([make(width) for _ in range(count)]) if eagle.tapped_norm == "each" else None
        self.fc = Linear(dim, count * width, ("embed", None), policy)
        self.layers = nnx.List([EagleLayer(config, eagle, policy)])
        self.norm = make_norm(config, policy)
        is_mapped = config.vocab_size != eagle.vocab_size
        self.d2t = parameter((config.vocab_size,), (None,), jnp.dtype(jnp.int32)) if is_mapped else None


class EagleHead(nnx.Module):
    """An EAGLE-3 head. The embedding of tokens is usually the model's."""

    def __init__(self, config: DecoderConfig, policy: DtypePolicy) -> None:
        """config: a decoder of one layer with `eagle`."""
        assert config.eagle is not None, "the config of a head"
        self.config, self.eagle = config, config.eagle
        self.model = EagleStack(config, config.eagle, policy)
        self.lm_head = Embedding(config.vocab_size, config.hidden_size, policy)

    def start(
        self, hidden: Float[Array, "T E"], tapped: Float[Array, "T KE"] | None, tokens: Tokens
    ) -> Float[Array, "T D"]:
        """Return the hidden state that the head begins with, from the inputs of the tapped layers."""
        assert tapped is not None, "a model with tapped layers"
        stack = self.model
        with jax.named_scope("combine"):
            if stack.input_norm is not None:
                tapped = stack.input_norm(tapped)
            if stack.fc_norm is not None:
                parts = jnp.split(tapped, len(stack.fc_norm), -1)
                tapped = jnp.concatenate([norm(x) for norm, x in zip(stack.fc_norm, parts, strict=True)], -1)
            return stack.fc(tapped, tokens)

    def embed(self, model: Decoder, token_ids: Int[Array, "T"]) -> Float[Array, "T D"]:
        """Return the embeddings of tokens, without the model's factor on them."""
        own = self.model.embed_tokens
        return model.model.embed_tokens(token_ids) if own is None else own(token_ids)

    def __call__(
        self, embeddings: Float[Array, "T D"], hidden: Float[Array, "T D"], cache: Cache, step: StepContext
    ) -> tuple[Float[Array, "T D"], Cache]:
        """Return the head's output of every token, and the cache with the layer's keys and values."""
        (layer,), (places,) = self.model.layers, self.config.cache.places
        with jax.named_scope("layer_0"):
            x, cache = layer(embeddings, hidden, cache, places, step)
        return (self.model.norm(x) if self.eagle.norm_output else x), cache

    def logits(self, model: Decoder, made: Float[Array, "B D"], num_rows: Int[Array, ""]) -> Float[Array, "B V"]:
        """Return logits of the model's vocabulary for outputs of the head; tokens that the head does not have get -inf."""
        stack = self.model
        logits = self.lm_head.logits(made if self.eagle.norm_output else stack.norm(made), num_rows)
        return logits if stack.d2t is None else in_model_vocabulary(logits, stack.d2t[...], model.config.vocab_size)


def in_model_vocabulary(logits: Float[Array, "R W"], d2t: Int[Array, "W"], vocab_size: int) -> Float[Array, "R V"]:
    """Return logits of a drafter's W tokens as those of the model's vocabulary; tokens that the drafter does not have get -inf.

    d2t: for each token of the drafter, what its number lacks to that of the model.
    """
    places = jnp.arange(logits.shape[1]) + d2t
    whole = jnp.full((len(logits), vocab_size), -jnp.inf, logits.dtype)
    return whole.at[:, places].set(logits, mode="drop", unique_indices=True)
