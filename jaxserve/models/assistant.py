"""A drafter of Gemma 4: a small decoder without keys and values of its own.

For the newest token t, which the model has not computed, the drafter takes the embedding e that the model has for t and the model's
final hidden state h of the token before it, and computes

    x = pre_projection([e, h])
    y = norm(layers(x))
    logits of the token after t = lm_head(y)
    h' = post_projection(y)

Its layers have queries only: each attends to what the last layer of its kind that stores keys and values in the model has stored of
the tokens before t. For further tokens h' and the drafted token take the places of h and t; the position stays that of t. With
centroids, logits are those of the tokens in the clusters whose centroids are nearest to y.

Source: transformers' `Gemma4AssistantForCausalLM` and `SinglePositionMultiTokenCandidateGenerator`. A layer with a window sees one
token more than the model's do, as the mask counts there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import StepContext
from jaxserve.layers.cache import Cache
from jaxserve.layers.linear import Embedding, Linear, Tokens
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.decoder import DecoderStack


class MaskedEmbedder(nnx.Module):
    """Clusters of tokens by their centroids."""

    def __init__(self, config: DecoderConfig, num_centroids: int, num_active: int, policy: DtypePolicy) -> None:
        self.centroids = Linear(num_centroids, config.hidden_size, (None, "embed"), policy)
        self.token_ordering = parameter((config.vocab_size,), (None,), jnp.dtype(jnp.int32))
        self.num_centroids, self.num_active = num_centroids, num_active

    def __call__(self, hidden: Float[Array, "B D"], tokens: Tokens) -> Int[Array, "B N"]:
        """Return the tokens of the nearest clusters of each row."""
        _, nearest = jax.lax.top_k(self.centroids(hidden, tokens).astype(jnp.float32), self.num_active)
        clusters = self.token_ordering[...].reshape(self.num_centroids, -1)
        return clusters[nearest].reshape(len(hidden), -1)


class Assistant(nnx.Module):
    """A drafter of Gemma 4. The embedding of tokens is the model's; its own is the output head."""

    def __init__(self, config: DecoderConfig, policy: DtypePolicy) -> None:
        """config: a decoder with `assistant`, whose layers read the model's keys and values."""
        assert config.assistant is not None, "the config of a drafter"
        own, dim, width = config.assistant, config.hidden_size, config.assistant.hidden_size
        self.config = config
        self.model = DecoderStack(config, policy)
        self.lm_head = None if config.tied_embeddings else Embedding(config.vocab_size, dim, policy)
        self.pre_projection = Linear(dim, 2 * width, ("embed", None), policy)
        self.post_projection = Linear(width, dim, ("embed", None), policy)
        self.masked_embedding = (
            None if own.num_centroids is None else MaskedEmbedder(config, own.num_centroids, own.num_active, policy)
        )

    def __call__(
        self, embeddings: Float[Array, "B E"], hidden: Float[Array, "B E"], cache: Cache, step: StepContext
    ) -> tuple[Float[Array, "B D"], Float[Array, "B E"], Cache]:
        """Return the input of `logits`, the hidden state for the next token, and the model's cache (DONATED), as it was.

        embeddings: of the newest tokens; hidden: of the tokens before them, or what an earlier call returned.
        """
        x = self.pre_projection(jnp.concatenate([embeddings, hidden], -1), step.tokens)
        for index, (layer, places) in enumerate(zip(self.model.layers, self.config.cache.places, strict=True)):
            with jax.named_scope(f"layer_{index}"):
                x, cache = layer(x, cache, places, step)
        assert self.model.norm is not None, "Gemma 4 has a last norm"
        made = self.model.norm(x)
        return made, self.post_projection(made, step.tokens), cache

    def logits(self, made: Float[Array, "B D"], num_rows: Int[Array, ""]) -> Float[Array, "B V"]:
        """Return logits in float32; tokens of other clusters get -inf."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        with jax.named_scope("head"):
            if self.masked_embedding is None:
                return head.logits(made, num_rows)
            tokens = self.masked_embedding(made, Tokens(num_rows))  # (B, N)
            if tokens.size >= self.config.vocab_size:  # the whole table is less to read
                logits = jnp.take_along_axis(head.logits(made, num_rows), tokens, 1)
            else:
                rows = head(tokens.reshape(-1)).reshape(*tokens.shape, -1)
                logits = jnp.einsum("bd,bnd->bn", made, rows, preferred_element_type=jnp.float32)
            whole = jnp.full((len(made), self.config.vocab_size), -jnp.inf, jnp.float32)
            return whole.at[jnp.arange(len(made))[:, None], tokens].set(logits, unique_indices=True)
