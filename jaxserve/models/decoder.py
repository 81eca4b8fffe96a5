"""The decoder: one forward function that serves every family, configured by a `DecoderConfig`.

Attribute names are Hugging Face's checkpoint names, so a parameter's path is the name it is loaded by.
Forward never mutates: the cache is an argument and a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.kv_write import KVScales
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import Attention, StepContext
from jaxserve.layers.cache import Cache, PendingStates, without_chosen
from jaxserve.layers.convolved_attention import ConvolvedAttention
from jaxserve.layers.experts import Mixture
from jaxserve.layers.linear import Embedding, Tokens
from jaxserve.layers.mixers import settle, with_segments
from jaxserve.layers.norm import make_norm
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.rope import LearnedFrequencies
from jaxserve.model_config.cache import CachePlace
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig, NormWeights
from jaxserve.models.blocks.altup import AltUpStreams
from jaxserve.models.blocks.layer import AfterMixer, DecoderLayer, scaled
from jaxserve.models.blocks.per_layer import PerLayerInputs
from jaxserve.models.blocks.residual import hyper_head
from jaxserve.models.embedding_head import DenseLayer, VectorHead
from jaxserve.models.vision import ImageTokens, VisionTower


class ReadTokens(NamedTuple):
    """The tokens of a step whose output is read."""

    places: Int[Array, "R"]
    num_real: Int[Array, ""]
    """Places after the first `num_real` are padding."""


class Forward(NamedTuple):
    """The results of a decoder's layers for the tokens of a step."""

    hidden: Float[Array, "R D"]
    """The output of the final norm: of the tokens that are read, or of all."""
    cache: Cache
    """The cache with what the layers store of the tokens."""
    experts: list[Int[Array, "_ k"]]
    """The experts of every token in each layer that has some (`Routing.experts`); in the last layer those of the tokens in `hidden`."""
    tapped: Float[Array, "T KD"] | None
    """The inputs of `DecoderConfig.tapped_layers`, side by side; None if there are no such layers."""
    all_hidden: Callable[[], Float[Array, "T D"]]
    """Return the output of the final norm of every token. It is computed in this call if `hidden` has only some."""


def _reads_tokens(layer: LayerConfig) -> bool:
    """Return True for a layer that reads the tokens besides their embeddings."""
    return layer.ngram is not None or (layer.experts is not None and layer.experts.is_hashed)


class PositionEmbedding(nnx.Module):
    """A table of learned embeddings, one for each position."""

    def __init__(self, config: DecoderConfig, first_row: int, policy: DtypePolicy) -> None:
        self.weight = parameter((first_row + config.max_position, config.hidden_size), (None, None), policy.vectors)
        self.first_row = first_row

    def __call__(self, positions: Int[Array, "T"]) -> Float[Array, "T D"]:
        return self.weight[...][positions + self.first_row]


class DecoderStack(nnx.Module):
    """Embedding, layers, final norm: the checkpoint's `model.` prefix."""

    def __init__(self, config: DecoderConfig, policy: DtypePolicy) -> None:
        self.embed_tokens = _table(config, policy, has_bias=config.lm_head_bias and config.tied_embeddings)
        dim = config.per_layer_dim
        self.per_layer = None if dim is None else PerLayerInputs(config, dim, policy)
        self.altup = None if config.altup is None else AltUpStreams(config, config.altup, policy)
        self.hc_head = None if config.hyper is None else hyper_head(config, config.hyper, policy)
        first = config.first_position_row
        weights: NormWeights | None = "none" if config.embedding_norm == "tokens" else None
        self.embed_norm = None if config.embedding_norm == "none" else make_norm(config, policy, weights=weights)
        self.embed_positions = None if first is None else PositionEmbedding(config, first, policy)
        self.rotary_emb = LearnedFrequencies(config) if config.has_learned_frequencies else None
        self.layers = nnx.List([DecoderLayer(config, layer, policy) for layer in config.layers])
        # Gated streams are normalised as they are joined.
        has_norm = config.hyper is None or config.hyper.gate_rank is None
        self.norm = make_norm(config, policy, weights=config.final_norm_weights) if has_norm else None
        self.input_hidden_states_scale, self.input_hidden_states_bias = (
            parameter((config.hidden_size,), (None,), policy.vectors) if config.has_residual_affine else None
            for _ in range(2)
        )


def _table(config: DecoderConfig, policy: DtypePolicy, *, has_bias: bool) -> Embedding:
    return Embedding(config.vocab_size, config.hidden_size, policy, has_logit_bias=has_bias)


class Decoder(nnx.Module):
    """A decoder-only language model."""

    def __init__(self, config: DecoderConfig, policy: DtypePolicy) -> None:
        self.config = config
        self.model = DecoderStack(config, policy)
        self.lm_head = None if config.tied_embeddings else _table(config, policy, has_bias=config.lm_head_bias)
        self.logit_layer = None if config.logit_layer is None else DenseLayer(config.logit_layer, policy)
        self.vision = None if config.vision is None else VisionTower(config.vision, policy)
        self.head = None if config.head is None else VectorHead(config.head, policy)

    def hidden(
        self,
        token_ids: Int[Array, "T"],
        cache: Cache,
        step: StepContext,
        images: ImageTokens | None = None,
        read: ReadTokens | None = None,
    ) -> tuple[Float[Array, "R D"], Cache]:
        """Return the final-norm output of the tokens that are read, and the cache with what the layers store of all tokens.

        images: None if no token of the step may stand for an image. read: None if all outputs are read.
        """
        return self.forward(token_ids, cache, step, images, read)[:2]

    def forward(
        self,
        token_ids: Int[Array, "T"],
        cache: Cache,
        step: StepContext,
        images: ImageTokens | None = None,
        read: ReadTokens | None = None,
    ) -> Forward:
        """Return what `hidden` returns, and what else the layers give.

        Only a token's output depends on what follows the mixer of the last layer, so that is computed for the tokens that are read.
        """
        if any(_reads_tokens(layer) for layer in self.config.layers):
            step = step._replace(token_ids=token_ids)
        if self.config.recurrent is not None:
            step = with_segments(step, len(token_ids))
        if any(layer.kv_source is not None for layer in self.config.layers):
            step = step._replace(kv_scales=self.kv_scales())
        if self.model.rotary_emb is not None and step.positions is not None:
            step = step._replace(rotation=self.model.rotary_emb(step.positions))
        with jax.named_scope("embed"):
            x = self.embed(token_ids)  # (T, D)
            if images is not None:
                x = images.replace(x)
            x = self._entered(x, step)
            make = self.model.per_layer
            own_ids = token_ids if images is None else images.per_layer_ids(token_ids, self.config)
            own = None if make is None else make(own_ids, x, step.tokens)  # (T, L, P)
        mixtures, inputs = list[Mixture](), []
        streams = self.model.altup or self.model.hc_head
        if streams is not None:
            x = streams.split(x, step.tokens)  # (A, T, D)
        last = len(self.model.layers) - 1
        for index, (layer, places) in enumerate(zip(self.model.layers, self.config.cache.places, strict=True)):
            inputs.append(x)
            with jax.named_scope(f"layer_{index}"):
                own_inputs = None if own is None else own[:, index]
                after_mixer, cache = layer.mix(x, cache, places, step, own_inputs, mixtures[-1] if mixtures else None)
                if index == last:
                    break
                x, experts = self._fed(index, after_mixer, step.tokens, images)
            if experts is not None:
                mixtures.append(experts)
        finish = partial(self._finish, after_mixer, step.tokens, images)
        x, hidden, experts = finish(read)
        inputs.append(x)
        chosen = [each.experts for each in (*mixtures, experts) if each is not None]
        taps = self.config.tapped_layers
        assert read is None or last + 1 not in taps, "the last output is tapped: all tokens are read"
        tapped = jnp.concatenate([inputs[index] for index in taps], -1) if taps else None
        return Forward(
            hidden, without_chosen(cache), chosen, tapped, lambda: hidden if read is None else finish(None)[1]
        )

    def _fed(
        self, index: int, after_mixer: AfterMixer, tokens: Tokens, images: ImageTokens | None
    ) -> tuple[Float[Array, "*streams T D"], Mixture | None]:
        """Return the output of a layer after its second block, and what its experts gave."""
        x, experts = self.model.layers[index].feed(after_mixer, tokens)
        return (x if images is None else images.add_deepstack(x, index)), experts

    def _finish(
        self, after_mixer: AfterMixer, tokens: Tokens, images: ImageTokens | None, read: ReadTokens | None
    ) -> tuple[Float[Array, "*streams R D"], Float[Array, "R D"], Mixture | None]:
        """Compute what follows the last layer's mixer: return its output, that of the final norm, and what its experts gave."""
        if read is not None:
            after_mixer, tokens = after_mixer.at(read.places), tokens.at(read.places, read.num_real)
            images = None if images is None else images.at(read.places)
        last = len(self.model.layers) - 1
        with jax.named_scope(f"layer_{last}"):
            x, experts = self._fed(last, after_mixer, tokens, images)
        streams = self.model.altup or self.model.hc_head
        joined = x if streams is None else streams.join(x, tokens)
        return x, joined if self.model.norm is None else self.model.norm(joined), experts

    def _entered(self, x: Float[Array, "T D"], step: StepContext) -> Float[Array, "T D"]:
        """Return embeddings of tokens with those of positions, and normalised, if the model does so."""
        table, norm = self.model.embed_positions, self.model.embed_norm
        factors, biases = self.model.input_hidden_states_scale, self.model.input_hidden_states_bias
        if factors is not None and biases is not None:
            x = (x + biases[...]) * factors[...]
        if table is not None:
            assert step.positions is not None, "a step of a model with embeddings of positions"
            x = x + table(step.positions).astype(x.dtype)
        return x if norm is None or self.config.embedding_norm != "inputs" else norm(x)

    def kv_scales(self) -> Mapping[CachePlace, KVScales]:
        """Return the scales of layers that store keys and values, by their place in the cache."""
        return {
            places.paged: layer.self_attn.kv_scales
            for layer, places in zip(self.model.layers, self.config.cache.places, strict=True)
            if places.paged is not None and places.paged.is_owner
            if isinstance(layer.self_attn, Attention | ConvolvedAttention) and layer.self_attn.kv_scales is not None
        }

    def settle(self, cache: Cache, step: StepContext, counts: Int[Array, "B"]) -> Cache:
        """Return the cache after a step of which the first `counts` tokens of each row stay.

        cache: from the step, with `PendingStates`, or without states; then it is what it was.
        """
        for layer, places in zip(self.model.layers, self.config.cache.places, strict=True):
            for mixer, place in layer.mixers(places):
                cache = settle(mixer, cache, place, step, counts)
        return tuple(group.pool if isinstance(group, PendingStates) else group for group in cache)

    def embed(self, token_ids: Int[Array, "T"]) -> Float[Array, "T D"]:
        """Return the embeddings of tokens as the first layer takes them."""
        x, norm = self.model.embed_tokens(token_ids), self.model.embed_norm
        if norm is not None and self.config.embedding_norm == "tokens":
            x = norm(x)
        return scaled(x, self.config.embedding_scale)

    def logits(self, hidden: Float[Array, "B D"], num_rows: Int[Array, ""]) -> Float[Array, "B V"]:
        """Return logits in float32; rows from `num_rows` on are padding."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        cap = self.config.logit_softcap
        with jax.named_scope("head"):
            hidden = hidden if self.logit_layer is None else self.logit_layer(hidden)
            logits = scaled(head.logits(hidden, num_rows), self.config.logit_scale)
            return logits if cap is None else jnp.tanh(logits / cap) * cap
