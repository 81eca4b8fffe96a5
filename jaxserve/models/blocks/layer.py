"""A layer of the decoder: a mixer, then a feed-forward block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from operator import add
from typing import Final, NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import Attention, StepContext
from jaxserve.layers.cache import Cache
from jaxserve.layers.compressed.attention import CompressedAttention
from jaxserve.layers.convolved_attention import ConvolvedAttention
from jaxserve.layers.experts import DenseAndExperts, Experts, Mixture
from jaxserve.layers.latent_attention import LatentAttention
from jaxserve.layers.linear import Tokens
from jaxserve.layers.mixers import MIXERS, mix
from jaxserve.layers.mlp import MLP
from jaxserve.layers.norm import GatedNorm, make_norm
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.recurrent import RecurrentMixer
from jaxserve.layers.recurrent_mixers.ngram import NgramEmbeddings
from jaxserve.model_config.cache import CachePlace, LayerPlaces
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig, NormPlacement
from jaxserve.model_config.recurrent import ConvolvedQKVConfig
from jaxserve.models.blocks.altup import AltUp, Laurel
from jaxserve.models.blocks.per_layer import PerLayerBlock
from jaxserve.models.blocks.residual import ResidualAffine, hyper_connection

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


class AfterMixer(NamedTuple):
    """The tokens of a layer after its first block. T is the last axis but one of every array."""

    x: Float[Array, "*streams T D"]
    """The residual streams with the first block added; with AltUp the active one."""
    entered: Float[Array, "*streams T D"]
    """The residual streams before the first block."""
    normed: Float[Array, "*streams T D"]
    """The normalised input of the first block; `entered` if there is none."""
    predictions: Float[Array, "A T D"] | None
    """All streams as AltUp predicts them; None without AltUp."""
    own: Float[Array, "T P"] | None
    """See `DecoderLayer.mix`."""
    routers: Float[Array, "T R"] | None
    """State of the router of the last layer with experts (`Mixture.state`); None: there is none."""

    def at(self, places: Int[Array, "R"]) -> AfterMixer:
        """Return only some of the tokens."""
        some: AfterMixer = jax.tree.map(lambda array: array[..., places, :], self)
        return some


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
        self, x: Float[Array, "T D"], cache: Cache, places: LayerPlaces, step: StepContext
    ) -> tuple[Float[Array, "T D"], Cache]:
        """Return the output of both blocks, and the cache."""
        after_mixer, cache = self.mix(x, cache, places, step)
        return self.feed(after_mixer, step.tokens)[0], cache

    def mix(
        self,
        x: Float[Array, "*streams T D"],
        cache: Cache,
        places: LayerPlaces,
        step: StepContext,
        own: Float[Array, "T P"] | None = None,
        before: Mixture | None = None,
    ) -> tuple[AfterMixer, Cache]:
        """Compute the first block, and return the cache with what the layer stores of the tokens.

        x has the streams of `AltUpStreams` or of hyper-connections if the decoder has them. own: the layer's share of the inputs of `PerLayerInputs`. before: what the experts of the last layer with some gave.
        """
        if self.ngram is not None:
            x, cache = self.ngram(x, cache, places, step)
        predictions = None if self.altup is None else self.altup.predict(x, step.tokens)
        x = x if self.altup is None or predictions is None else predictions[self.altup.active]
        normed, entered = x, x
        if self.has_mixer:
            read, added = (
                (x, self.post_attention_residual_scale or add) if self.attn_hc is None else self.attn_hc(x, step.tokens)
            )
            with jax.named_scope("attention"):
                normed = self._norm(0)(read)
                mixed, cache = self._mixed(normed, cache, places, step)
            made = scaled(self._norm(1)(mixed), self.residual_scale)
            if self.residual_scales is not None:
                x, made = (scaled(*each) for each in zip((normed, made), self.residual_scales[:2], strict=True))
            x = added(x, made)
            if self.laurel is not None:
                x = (x + self.laurel(normed, step.tokens)) * 2**-0.5
        return AfterMixer(x, entered, normed, predictions, own, None if before is None else before.state), cache

    def feed(self, after_mixer: AfterMixer, tokens: Tokens) -> tuple[Float[Array, "*streams T D"], Mixture | None]:
        """Compute the second block: return the layer's output, and what its experts gave, None in a layer without."""
        x, experts = self._fed(after_mixer, tokens)
        own, predictions = after_mixer.own, after_mixer.predictions
        if self.altup is None or predictions is None:
            if self.per_layer is not None and own is not None:
                x = x + self.per_layer(x, own, tokens)
            return x if self.layer_scalar is None else x * self.layer_scalar[...], experts
        x = self.altup.correct(predictions, x, tokens)
        assert self.per_layer is not None and own is not None, "alternating updates come with per-layer embeddings"
        return self.altup.add(x, self.per_layer(self.altup.active_output(x), own, tokens)), experts

    def _fed(self, after_mixer: AfterMixer, tokens: Tokens) -> tuple[Float[Array, "*streams T D"], Mixture | None]:
        """Return the residual streams with the feed-forward block added, and what the experts gave. Those of AltUp are not among them."""
        x, experts = after_mixer.x, None
        if self.mlp is None:
            return x, None
        read, added = (x, self.post_mlp_residual_scale or add) if self.ffn_hc is None else self.ffn_hc(x, tokens)
        with jax.named_scope("mlp"):
            inputs = (
                after_mixer.normed
                if self.is_parallel
                else self._norm(2)(after_mixer.entered if self.is_apart else read)
            )
            if isinstance(self.mlp, MLP):
                made = self.mlp(inputs, tokens)
            else:
                experts = self.mlp(inputs, tokens, before=after_mixer.routers)
                made = experts.output
        made = scaled(self._norm(3)(made), self.residual_scale)
        if self.residual_scales is not None:
            x, made = (scaled(*each) for each in zip((inputs, made), self.residual_scales[2:], strict=True))
        return added(x, made), experts

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

    def _norm(self, index: int) -> Callable[[Array], Array]:
        name = self.norms[index]
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


def scaled(x: Array, factor: float) -> Array:
    """Return x * factor in the dtype of x."""
    return x if factor == 1 else x * factor
