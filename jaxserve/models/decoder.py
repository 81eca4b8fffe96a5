"""The decoder: one forward function that serves every family, configured by a `DecoderConfig`.

Attribute names are Hugging Face's checkpoint names, so a parameter's path is the name it is loaded by.
Forward never mutates: the cache is an argument and a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from operator import add
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.kv_write import KVScales
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import Attention, StepContext
from jaxserve.layers.cache import Cache, PendingStates, without_chosen
from jaxserve.layers.compressed.attention import CompressedAttention
from jaxserve.layers.convolved_attention import ConvolvedAttention
from jaxserve.layers.experts import DenseAndExperts, Experts, Mixture
from jaxserve.layers.latent_attention import LatentAttention
from jaxserve.layers.linear import Embedding
from jaxserve.layers.mixers import MIXERS, mix, settle, with_segments
from jaxserve.layers.mlp import MLP
from jaxserve.layers.norm import GatedNorm, make_norm
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.recurrent import RecurrentMixer
from jaxserve.layers.recurrent_mixers.ngram import NgramEmbeddings
from jaxserve.layers.rope import LearnedFrequencies
from jaxserve.model_config.cache import CachePlace, LayerPlaces
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig, NormPlacement, NormWeights
from jaxserve.model_config.recurrent import ConvolvedQKVConfig
from jaxserve.models.altup import AltUp, AltUpStreams, Laurel
from jaxserve.models.embedding_head import DenseLayer, VectorHead
from jaxserve.models.per_layer import PerLayerBlock, PerLayerInputs
from jaxserve.models.residual import ResidualAffine, hyper_connection, hyper_head
from jaxserve.models.vision import ImageTokens, VisionTower

_NORMS: Final[Mapping[NormPlacement, tuple[str | None, str | None, str | None, str | None]]] = {
    "pre": ("input_layernorm", None, "post_attention_layernorm", None),
    "entry": ("input_layernorm", None, "post_attention_layernorm", None),
    "pre_mlp": (None, None, "post_attention_layernorm", None),
    "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "sandwich": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "sandwich_mlp": ("input_layernorm", None, "post_attention_layernorm", "post_feedforward_layernorm"),
    "parallel": ("input_layernorm", None, None, None),
    "parallel_apart": ("input_layernorm", None, "post_attention_layernorm", None),
    "none": (None, None, None, None),
}
"""Checkpoint names of the norms before and after attention, then before and after the feed-forward block."""


class Forward(NamedTuple):
    """The results of a decoder's layers for the tokens of a step."""

    hidden: Float[Array, "T D"]
    """The output of the final norm."""
    cache: Cache
    """The cache with what the layers store of the tokens."""
    experts: list[Int[Array, "T k"]]
    """The experts of every token in each layer that has some (`Routing.experts`)."""
    tapped: Float[Array, "T KD"] | None
    """The inputs of `DecoderConfig.tapped_layers`, side by side; None if there are no such layers."""


class DecoderLayer(nnx.Module):
    """Compute x + mixer(x), then x + mlp(x) or x + experts(x), with norms before the blocks, after them, or both.

    The mixer is attention, a recurrent mixer, or both side by side. A layer may have only one of the two blocks. With parallel blocks, compute x + mixer(y) + mlp(z) of the normalised y and z, mostly the same, instead.
    """

    def __init__(self, config: DecoderConfig, layer: LayerConfig, policy: DtypePolicy) -> None:
        placement = layer.norm_placement or config.norm_placement
        self.norms = _NORMS[placement]
        if layer.experts is not None and layer.experts.has_dense:
            self.norms = (*self.norms[:2], None, self.norms[3])  # each of the two blocks normalises its own input
        self.has_mixer = layer.has_kv or layer.recurrent is not None
        if not self.has_mixer:
            self.norms = (None, None, *self.norms[2:])
        if not layer.has_mlp:
            self.norms = (*self.norms[:2], None, None)
        gated = (0,) if layer.experts is None else (0, 2)
        for index, name in enumerate(self.norms):
            if name is not None and config.norm_gate_rank is not None and index in gated:
                setattr(self, name, GatedNorm(config, config.norm_gate_rank, policy))
            elif name is not None:
                setattr(self, name, make_norm(config, policy, eps=config.post_norm_eps if index % 2 else None))
        self.self_attn = _attention(config, layer, policy) if layer.has_kv else None
        self.mixer: str | None = None
        """Attribute of the recurrent mixer beside attention or in its place, named as in checkpoints."""
        if layer.recurrent is not None and not isinstance(layer.recurrent, ConvolvedQKVConfig):
            self.mixer = layer.recurrent.module
            setattr(self, self.mixer, MIXERS[type(layer.recurrent)](config, layer.recurrent, policy))
        self.mlp = _feed_forward(config, layer, policy) if layer.has_mlp else None
        self.altup = None if config.altup is None else AltUp(config, config.altup, policy)
        self.laurel = None if config.laurel_rank is None else Laurel(config, config.laurel_rank, policy)
        self.per_layer = None if config.per_layer_dim is None else PerLayerBlock(config, config.per_layer_dim, policy)
        self.layer_scalar = parameter((1,), (None,), policy.vectors) if config.has_layer_scales else None
        self.residual_scale = config.residual_scale
        self.post_attention_residual_scale, self.post_mlp_residual_scale = (
            ResidualAffine(config.hidden_size, policy) if config.has_residual_affine else None for _ in range(2)
        )
        hyper = config.hyper
        self.attn_hc, self.ffn_hc = (
            None if hyper is None else hyper_connection(config, hyper, policy) for _ in range(2)
        )
        self.ngram = None if layer.ngram is None else NgramEmbeddings(config, layer.ngram, policy)
        self.is_parallel, self.is_apart = placement == "parallel", placement == "parallel_apart"
        self.residual_scales = layer.residual_scales if placement == "entry" else None

    def __call__(
        self,
        x: Float[Array, "*streams T D"],
        cache: Cache,
        places: LayerPlaces,
        step: StepContext,
        own: Float[Array, "T P"] | None = None,
        before: Mixture | None = None,
    ) -> tuple[Float[Array, "*streams T D"], Cache, Mixture | None]:
        """Return the layer's output, the cache, and what its experts gave, None in a layer without.

        x has the streams of `AltUpStreams` or of hyper-connections if the decoder has them. own: the layer's share of the inputs of `PerLayerInputs`. before: what the experts of the last layer with some gave.
        """
        if self.ngram is not None:
            x, cache = self.ngram(x, cache, places, step)
        if self.altup is None:
            x, cache, experts = self._blocks(x, cache, places, step, before)
            if self.per_layer is not None and own is not None:
                x = x + self.per_layer(x, own, step.tokens)
            return x if self.layer_scalar is None else x * self.layer_scalar[...], cache, experts
        predictions = self.altup.predict(x, step.tokens)
        found, cache, experts = self._blocks(predictions[self.altup.active], cache, places, step, before)
        x = self.altup.correct(predictions, found, step.tokens)
        assert self.per_layer is not None and own is not None, "alternating updates come with per-layer embeddings"
        return self.altup.add(x, self.per_layer(self.altup.active_output(x), own, step.tokens)), cache, experts

    def _blocks(
        self,
        x: Float[Array, "*streams T D"],
        cache: Cache,
        places: LayerPlaces,
        step: StepContext,
        before: Mixture | None,
    ) -> tuple[Float[Array, "*streams T D"], Cache, Mixture | None]:
        """Return the residual streams after both blocks, the cache and what the experts gave. Those of AltUp are not among them."""
        pre_attention, post_attention, pre_mlp, post_mlp = map(self._norm, self.norms)
        normed, entered = x, x
        if self.has_mixer:
            read, added = (
                (x, self.post_attention_residual_scale or add) if self.attn_hc is None else self.attn_hc(x, step.tokens)
            )
            with jax.named_scope("attention"):
                normed = pre_attention(read)
                mixed, cache = self._mixed(normed, cache, places, step)
            made = scaled(post_attention(mixed), self.residual_scale)
            if self.residual_scales is not None:
                x, made = (scaled(*each) for each in zip((normed, made), self.residual_scales[:2], strict=True))
            x = added(x, made)
            if self.laurel is not None:
                x = (x + self.laurel(normed, step.tokens)) * 2**-0.5
        experts: Mixture | None = None
        if self.mlp is not None:
            read, added = (
                (x, self.post_mlp_residual_scale or add) if self.ffn_hc is None else self.ffn_hc(x, step.tokens)
            )
            with jax.named_scope("mlp"):
                inputs = normed if self.is_parallel else pre_mlp(entered if self.is_apart else read)
                if isinstance(self.mlp, MLP):
                    made = self.mlp(inputs, step.tokens)
                else:
                    experts = self.mlp(inputs, step.tokens, before=None if before is None else before.state)
                    made = experts.output
            made = scaled(post_mlp(made), self.residual_scale)
            if self.residual_scales is not None:
                x, made = (scaled(*each) for each in zip((inputs, made), self.residual_scales[2:], strict=True))
            x = added(x, made)
        return x, cache, experts

    def _mixed(
        self, x: Float[Array, "T D"], cache: Cache, places: LayerPlaces, step: StepContext
    ) -> tuple[Float[Array, "T D"], Cache]:
        """Return the output of attention, of the recurrent mixer, or the sum of both."""
        outputs = []
        if self.mixer is not None:
            made, cache = mix(getattr(self, self.mixer), x, cache, places.state, step)
            outputs.append(made)
        if self.self_attn is not None:
            made, cache = self.self_attn(x, cache, places, step)
            outputs.append(made)
        return reduce(add, outputs), cache

    def _norm(self, name: str | None) -> Callable[[Array], Array]:
        return (lambda x: x) if name is None else getattr(self, name)

    def mixers(self, places: LayerPlaces) -> list[tuple[RecurrentMixer, CachePlace]]:
        """Return the recurrent mixers of the layer, with the places of their states."""
        found: list[tuple[RecurrentMixer | None, CachePlace | None]] = []
        if self.ngram is not None:
            found += [(self.ngram.last_tokens, places.last_tokens), (self.ngram.last_inputs, places.last_inputs)]
        own: RecurrentMixer | None = None if self.mixer is None else getattr(self, self.mixer)
        if isinstance(self.self_attn, ConvolvedAttention):
            own = self.self_attn.convolved_qkv
        found.append((own, places.state))
        return [(mixer, place) for mixer, place in found if mixer is not None and place is not None]


def _attention(
    config: DecoderConfig, layer: LayerConfig, policy: DtypePolicy
) -> Attention | LatentAttention | CompressedAttention | ConvolvedAttention:
    if isinstance(layer.recurrent, ConvolvedQKVConfig):
        return ConvolvedAttention(config, layer, layer.recurrent, policy)
    if config.compressed is not None:
        return CompressedAttention(config, layer, policy)
    return (Attention if config.latent is None else LatentAttention)(config, layer, policy)


def _feed_forward(config: DecoderConfig, layer: LayerConfig, policy: DtypePolicy) -> MLP | Experts | DenseAndExperts:
    if layer.experts is None:
        width, sparsity, limit = layer.intermediate_size, layer.activation_sparsity, layer.mlp_limit
        return MLP(config, policy, width=width, sparsity=sparsity, limit=limit)
    return (DenseAndExperts if layer.experts.has_dense else Experts)(config, layer.experts, policy)


def _reads_tokens(layer: LayerConfig) -> bool:
    """Return True for a layer that reads the tokens besides their embeddings."""
    return layer.ngram is not None or (layer.experts is not None and layer.experts.is_hashed)


def scaled(x: Array, factor: float) -> Array:
    """Return x * factor in the dtype of x."""
    return x if factor == 1 else x * factor


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
        self, token_ids: Int[Array, "T"], cache: Cache, step: StepContext, images: ImageTokens | None = None
    ) -> tuple[Float[Array, "T D"], Cache]:
        """Return the final-norm output of every token, and the cache with what the layers store of them.

        images: None if no token of the step may stand for an image.
        """
        return self.forward(token_ids, cache, step, images)[:2]

    def forward(
        self, token_ids: Int[Array, "T"], cache: Cache, step: StepContext, images: ImageTokens | None = None
    ) -> Forward:
        """Return what `hidden` returns, and what else the layers give."""
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
        for index, (layer, places) in enumerate(zip(self.model.layers, self.config.cache.places, strict=True)):
            inputs.append(x)
            with jax.named_scope(f"layer_{index}"):
                own_inputs = None if own is None else own[:, index]
                x, cache, experts = layer(x, cache, places, step, own_inputs, mixtures[-1] if mixtures else None)
                if images is not None:
                    x = images.add_deepstack(x, index)
            if experts is not None:
                mixtures.append(experts)
        inputs.append(x)
        taps = self.config.tapped_layers
        tapped = jnp.concatenate([inputs[index] for index in taps], -1) if taps else None
        x = x if streams is None else streams.join(x, step.tokens)
        hidden = x if self.model.norm is None else self.model.norm(x)
        return Forward(hidden, without_chosen(cache), [each.experts for each in mixtures], tapped)

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
