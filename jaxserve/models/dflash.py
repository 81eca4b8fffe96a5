"""A DFlash drafter of a decoder: it predicts a block of tokens at once.

For every token t that the model has computed, the drafter takes the model's residual stream at t after several of its layers, and computes

    h = hidden_norm(fc([outputs of the tapped layers at t]))

Each of its layers projects h to a key and a value, which lie in its cache at the place of t. A block is the newest token, which the model
has not computed, and a mask token for each token to draft, at the positions after it. The drafter computes

    x = embeddings of the block
    y = norm(layers(x))
    logits of the token at a mask's own position = lm_head(y)

with decoder layers as in Qwen3. The tokens of a block attend to all keys of the cache, and to each other in both directions; in causal
layers, to those before them only. Embedding and output head are the model's, unless the drafter has fewer tokens.

Source: DFlash (arXiv 2602.06036), and the code beside z-lab's checkpoints.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import Attention, StepContext
from jaxserve.layers.cache import Cache
from jaxserve.layers.linear import Embedding, Linear
from jaxserve.layers.norm import make_norm
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.predictor import DFlashConfig
from jaxserve.models.blocks.layer import DecoderLayer, scaled
from jaxserve.models.decoder import Decoder
from jaxserve.models.eagle import in_model_vocabulary


class DFlashStack(nnx.Module):
    """Projection, layers, output norm: the prefix `model.` of `checkpoint.drafters.dflash`."""

    def __init__(self, config: DecoderConfig, dflash: DFlashConfig, policy: DtypePolicy) -> None:
        dim = config.hidden_size
        self.fc = Linear(dim, len(dflash.layers) * dim, ("embed", None), policy)
        self.hidden_norm = make_norm(config, policy)
        self.layers = nnx.List([DecoderLayer(config, layer, policy) for layer in config.layers])
        self.norm = make_norm(config, policy)
        is_mapped = config.vocab_size != dflash.vocab_size
        self.d2t = parameter((config.vocab_size,), (None,), jnp.dtype(jnp.int32)) if is_mapped else None


class DFlashDrafter(nnx.Module):
    """A DFlash drafter."""

    def __init__(self, config: DecoderConfig, policy: DtypePolicy) -> None:
        """config: a decoder with `dflash`."""
        assert config.dflash is not None, "the config of a drafter"
        self.config, self.dflash = config, config.dflash
        self.model = DFlashStack(config, config.dflash, policy)
        is_mapped = self.model.d2t is not None
        self.lm_head = Embedding(config.vocab_size, config.hidden_size, policy) if is_mapped else None

    def store(self, tapped: Float[Array, "T KD"], cache: Cache, step: StepContext) -> Cache:
        """Return the cache (DONATED) with the keys and values of tokens that the model has computed. tapped: the inputs of its tapped
        layers."""
        with jax.named_scope("combine"):
            features = self.model.hidden_norm(self.model.fc(tapped, step.tokens))
        for index, (layer, places) in enumerate(zip(self.model.layers, self.config.cache.places, strict=True)):
            assert isinstance(layer.self_attn, Attention), "layers as in Qwen3"
            with jax.named_scope(f"layer_{index}"):
                cache = layer.self_attn.store(features, cache, places, step)
        return cache

    def embed(self, model: Decoder, token_ids: Int[Array, "T"]) -> Float[Array, "T D"]:
        """Return the embeddings of the tokens of blocks."""
        scale = self.dflash.embedding_scale
        return model.embed(token_ids) if scale is None else scaled(model.model.embed_tokens(token_ids), scale)

    def __call__(self, x: Float[Array, "T D"], cache: Cache, step: StepContext) -> tuple[Float[Array, "T D"], Cache]:
        """Return the input of `logits` for the tokens of blocks with these embeddings, and the cache (DONATED), in which their keys and
        values lie at their positions."""
        for index, (layer, places) in enumerate(zip(self.model.layers, self.config.cache.places, strict=True)):
            with jax.named_scope(f"layer_{index}"):
                x, cache = layer(x, cache, places, step)
        return self.model.norm(x), cache

    def logits(self, model: Decoder, made: Float[Array, "R D"], num_rows: Int[Array, ""]) -> Float[Array, "R V"]:
        """Return logits of the model's vocabulary for outputs of masks; tokens that the drafter does not have get -inf."""
        if self.lm_head is None or self.model.d2t is None:
            return model.logits(made, num_rows)
        own = self.lm_head.logits(made, num_rows)
        return in_model_vocabulary(own, self.model.d2t[...], model.config.vocab_size)
