"""The multi-token-prediction (MTP) layer of a decoder: it predicts the token after the next one.

For a token t and the token u that follows it, the layer takes the model's final hidden state h of t and the embedding e of u, and
computes

    x = eh_proj([enorm(e), hnorm(h)])
    h' = norm(layer(x))

with a decoder layer that has keys and values of its own. The model's output head makes the logits of the token after u of
h'. For further tokens the layer takes its own h' and the embedding of the token that it has predicted.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2). h is the output of the model's final norm, as in transformers' `MtpModel`;
the place of u and h in the cache is that of t.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import StepContext
from jaxserve.layers.cache import Cache, without_chosen
from jaxserve.layers.linear import Linear, Tokens
from jaxserve.layers.norm import make_norm
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.decoder import Decoder, DecoderLayer


class PredictorStack(nnx.Module):
    """Norms, projection, one layer, final norm: the prefix `model.` of `checkpoint.drafters.mtp`."""

    def __init__(self, config: DecoderConfig, policy: DtypePolicy) -> None:
        dim = config.hidden_size
        self.enorm = make_norm(config, policy)
        self.hnorm = make_norm(config, policy)
        self.eh_proj = Linear(dim, 2 * dim, ("embed", None), policy)
        self.layers = nnx.List([DecoderLayer(config, layer, policy) for layer in config.layers])
        self.norm = make_norm(config, policy)


class MultiTokenPredictor(nnx.Module):
    """An MTP layer. Embedding and output head are the model's."""

    def __init__(self, config: DecoderConfig, policy: DtypePolicy) -> None:
        """config: a decoder of one layer."""
        self.config = config
        self.model = PredictorStack(config, policy)

    def start(
        self, hidden: Float[Array, "T D"], tapped: Float[Array, "T KD"] | None, tokens: Tokens
    ) -> Float[Array, "T D"]:
        """Return the hidden state that the layer begins with: the model's final one."""
        return hidden

    def embed(self, model: Decoder, token_ids: Int[Array, "T"]) -> Float[Array, "T D"]:
        """Return the embeddings of tokens."""
        return model.embed(token_ids)

    def logits(self, model: Decoder, made: Float[Array, "B D"], num_rows: Int[Array, ""]) -> Float[Array, "B V"]:
        """Return logits for outputs of the layer."""
        return model.logits(made, num_rows)

    def __call__(
        self, embeddings: Float[Array, "T D"], hidden: Float[Array, "T D"], cache: Cache, step: StepContext
    ) -> tuple[Float[Array, "T D"], Cache]:
        """Return the head's input for the token after the next one of each token, and the cache (DONATED).

        embeddings: of the tokens that follow; hidden: of the tokens themselves, whose places `step` has.
        """
        stack = self.model
        with jax.named_scope("combine"):
            both = jnp.concatenate([stack.enorm(embeddings), stack.hnorm(hidden)], -1)
            x = stack.eh_proj(both, step.tokens)
        (layer,), (places,) = stack.layers, self.config.cache.places
        with jax.named_scope("layer_0"):
            x, cache, _ = layer(x, cache, places, step)
        return stack.norm(x), without_chosen(cache)
