"""The multi-token-prediction (MTP) layer of a decoder: it predicts the token after the next one.

For a token t and the token u that follows it, the layer takes the model's final hidden state h of t and the embedding e of u, and
computes

    x = eh_proj([enorm(e), hnorm(h)])
    h' = norm(layer(x))

with a decoder layer that has keys and values of its own. The model's output head makes the logits of the token after u of
h'. For further tokens the layer takes its own h' and the embedding of the token that it has predicted. The place of u and h in the
cache is that of t.

Families differ in what `MTPConfig` says: in the order of the projection's inputs, and in the head. Some take for h the residual stream
after the model's last layer, and for h' that of the layer; the logits are those of norm(h'). Their checkpoints have no norm for it, or their code
none before the layer: ERNIE 4.5 uses the model's final norm, which the checkpoint of the layer then has.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2), whose h is the output of the model's final norm, as in transformers' `MtpModel`;
for others see `checkpoint.drafters.mtp`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import StepContext
from jaxserve.layers.cache import Cache, without_chosen
from jaxserve.layers.linear import Embedding, Linear, Tokens
from jaxserve.layers.norm import make_norm
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.blocks.layer import DecoderLayer
from jaxserve.models.decoder import Decoder


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
    """An MTP layer. The embedding is the model's, and mostly the output head."""

    def __init__(self, config: DecoderConfig, policy: DtypePolicy) -> None:
        """config: a decoder of one layer with `mtp`."""
        assert config.mtp is not None, "the config of an MTP layer"
        self.config, self.mtp = config, config.mtp
        self.model = PredictorStack(config, policy)
        has_head = config.mtp.has_own_head
        self.lm_head = Embedding(config.vocab_size, config.hidden_size, policy) if has_head else None

    def start(
        self, hidden: Float[Array, "T D"], tapped: Float[Array, "T KD"] | None, tokens: Tokens
    ) -> Float[Array, "T D"]:
        """Return the hidden state that the layer begins with: the model's final one, or the residual stream before its norm."""
        if not self.mtp.reads_residual:
            return hidden
        assert tapped is not None, "a model whose last output is tapped"
        return tapped

    def embed(self, model: Decoder, token_ids: Int[Array, "T"]) -> Float[Array, "T D"]:
        """Return the embeddings of tokens."""
        return model.embed(token_ids)

    def logits(self, model: Decoder, made: Float[Array, "B D"], num_rows: Int[Array, ""]) -> Float[Array, "B V"]:
        """Return logits for outputs of the layer."""
        made = self.model.norm(made) if self.mtp.reads_residual else made
        return model.logits(made, num_rows) if self.lm_head is None else self.lm_head.logits(made, num_rows)

    def __call__(
        self, embeddings: Float[Array, "T D"], hidden: Float[Array, "T D"], cache: Cache, step: StepContext
    ) -> tuple[Float[Array, "T D"], Cache]:
        """Return the output for the token after the next one of each token, from which the layer continues, and the cache (DONATED).

        embeddings: of the tokens that follow; hidden: of the tokens themselves, whose places `step` has.
        """
        stack = self.model
        with jax.named_scope("combine"):
            both = stack.enorm(embeddings), stack.hnorm(hidden)
            x = stack.eh_proj(jnp.concatenate(both[::-1] if self.mtp.hidden_first else both, -1), step.tokens)
        (layer,), (places,) = stack.layers, self.config.cache.places
        with jax.named_scope("layer_0"):
            x, cache = layer(x, cache, places, step)
        return (x if self.mtp.reads_residual else stack.norm(x)), without_chosen(cache)
