"""Decoder-only transformers, as data. A family turns a checkpoint's `config.json` into a DecoderConfig."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from jaxserve.model_config.activation import Activation
from jaxserve.model_config.altup import AltUpConfig
from jaxserve.model_config.assistant import AssistantConfig
from jaxserve.model_config.cache import CacheGroup, CacheLayout, LayerCache, cache_layout
from jaxserve.model_config.checkpoint_quantization import CheckpointQuantization
from jaxserve.model_config.compressed import CompressedConfig, Compression
from jaxserve.model_config.embedding_head import EmbeddingHead, HeadLayer
from jaxserve.model_config.experts import ClampedGate, ExpertsConfig
from jaxserve.model_config.hyper import HyperConfig
from jaxserve.model_config.indexer import BlockIndexerConfig
from jaxserve.model_config.latent import IndexerConfig, LatentConfig
from jaxserve.model_config.predictor import DFlashConfig, EagleConfig, MTPConfig
from jaxserve.model_config.recurrent import NgramConfig, RecurrentConfig
from jaxserve.model_config.rope import QueryScaling, RopeScaling, RotaryPairs
from jaxserve.model_config.vision import VisionConfig

NormPlacement = Literal[
    "pre", "pre_mlp", "entry", "post", "sandwich", "sandwich_mlp", "parallel", "parallel_apart", "none"
]
"""Each block normalises its input (pre: Llama), its output (post: OLMo 2) or both (sandwich: Gemma).

entry: as pre, and a block's output is added to its normalised input, see `LayerConfig.residual_scales` (MiniMax-01). pre_mlp: only the feed-forward block normalises its input (the first layer of ModernBERT). sandwich_mlp: as pre, and the feed-forward block normalises its output, too (A.X-K1's layers with experts).
parallel: attention and the feed-forward block read the same normalised input, and both are added to x (Cohere 2). parallel_apart: the same, but each has a norm of its own (GPT-NeoX). none: residual streams are normalised as blocks read them (Qwen4-Exp)."""
NormKind = Literal["rms", "layer", "layer_with_bias"]
"""rms: RMSNorm; layer: LayerNorm without a bias (Cohere 2); layer_with_bias: LayerNorm (StableLM)."""
NormWeights = Literal["plain", "wide", "offset", "none"]
"""plain: multiplied in the activations' dtype; wide: in float32; offset: in float32 by 1 + weight (Gemma); none: there are none (NanoChat). Norms of layers have these, and those of queries and keys."""
Sinks = Literal["none", "all", "windows"]
"""Attention sinks, a logit in the softmax without a value for each head: in all layers, or in those with a window."""
EmbeddingNorm = Literal["none", "tokens", "inputs"]
"""Norm of embeddings. tokens: of those of tokens, without weights; inputs: of those that the first layer gets, with weights."""
OutputGate = Literal["none", "queries", "apart", "heads"]
"""Gate of each head's output. queries: the query projection has it after the head's query (Qwen3-Next); apart: a projection of its own has it (AFMoE); heads: the same, with one number for each head (LFM3)."""
GateActivation = Literal["sigmoid", "softplus"]
"""Activation of the gate of each head's output: sigmoid (Qwen3-Next), or softplus in float32 (Laguna)."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Features that may differ from layer to layer."""

    sliding_window: int | None = None
    """Tokens a query attends to, itself included, on each side if the model `is_bidirectional`; None: all tokens."""
    use_rope: bool = True
    """False: no positional encoding in this layer (SmolLM3's NoPE layers)."""
    is_chunked: bool = False
    """True: a query attends to the tokens from the last multiple of `sliding_window` on (Llama 4)."""
    experts: ExpertsConfig | None = None
    """None: a dense feed-forward block. All layers with experts have the same number and width."""
    intermediate_size: int | None = None
    """Width of this layer's dense feed-forward block; None: the model's."""
    activation_sparsity: float = 0.0
    """Share of the gate's outputs that the feed-forward block sets to zero if they are normally distributed: those below a multiple of their standard deviation above their mean; the others are lowered by it (Gemma 3n). 0: none."""
    mlp_limit: float | None = None
    """Bound of the activated gate of this layer's dense feed-forward block, and of its other input in both directions (Step 3.7); None: none."""
    num_heads: int | None = None
    """Query heads of this layer; None: the model's."""
    num_kv_heads: int | None = None
    """KV heads of this layer; None: the model's."""
    kv_copies: int = 1
    """Copies of each of the checkpoint's KV heads among this layer's `num_kv_heads`, if it has its own number."""
    head_dim: int | None = None
    """Head dim of this layer; None: the model's."""
    has_kv: bool = True
    """False: the layer has no attention, and no KV pages."""
    has_mlp: bool = True
    """False: the layer has no feed-forward block, and only a norm before its mixer (Nemotron-H)."""
    latent_dim: int | None = None
    """Width of the one vector per token that the layer caches instead of keys and values (MLA); None: it has none."""
    kv_source: int | None = None
    """Earlier layer whose cached keys and values this layer reads; None: its own."""
    blocks: BlockIndexerConfig | None = None
    """Indexer that chooses the blocks of tokens that grouped-query attention goes to; None: a query attends to all."""
    compression: Compression | None = None
    """Blocks of tokens that queries attend to as well as to a window, in a model with `compressed`; None: to the window only."""
    index_source: int | None = None
    """Earlier layer whose indexer chooses the tokens that this layer attends to; None: its own, if there is one."""
    has_value_projection: bool = True
    """False: the values are the projected keys, before norm and rotation."""
    recurrent: RecurrentConfig | None = None
    """A mixer with a state of fixed size; None: there is none."""
    ngram: NgramConfig | None = None
    """Embeddings of several tokens in a row that a layer without attention adds to its input; None: there are none."""
    residual_scales: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    """Factors of "entry": on what the mixer's output is added to and on that output, then of the feed-forward block."""
    norm_placement: NormPlacement | None = None
    """Norms of this layer; None: as in the model (OLMo Hybrid, ModernBERT)."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder-only transformer. L layers, D model, N query heads, K kv heads, H head dim, F ffn, V vocab, E experts."""

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F, of layers without experts
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    layers: tuple[LayerConfig, ...]  # L
    max_position: int
    """Longest context the checkpoint declares or can be extended to: see `with_context`."""
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None  # R
    """Leading dimensions of a head that rotate; None: all."""
    rotary_pairs: RotaryPairs = "halves"
    activation: Activation = "silu"
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qkv_clip: float | None = None
    """Bound of projected queries, keys and values, which are clipped to it (OLMo); None: they are not."""
    qk_norm: Literal["none", "heads", "each_head", "whole", "rotated_heads", "rotated_unit"] = "none"
    """Norms of queries and keys: over the H of each head, with the same weights (Qwen3) or with weights of each head's own (StableLM 2 12B), or over all heads together (OLMo 2), before rope; or over the H of each head after rope, with weights (Hunyuan), or without and only in layers with rope (Llama 4)."""
    qk_norm_kind: NormKind = "rms"
    has_value_norm: bool = False
    """True if the H values of each head are divided by their root mean square, without weights."""
    norm_placement: NormPlacement = "pre"
    norm_kind: NormKind = "rms"
    """Kind of all norms outside of attention."""
    norm_gate_rank: int | None = None
    """Rank of gates on the outputs of the norms before attention and before experts (A.X-K2); None: there are none."""
    norm_weights: NormWeights = "plain"
    """Weights of norms, if the next two fields say nothing else."""
    qk_norm_weights: NormWeights | None = None
    """Weights of the norms of queries and keys; None: `norm_weights`."""
    final_norm_weights: NormWeights | None = None
    """Weights of the norm after the last layer; None: `norm_weights` (Muse Glimmer)."""
    post_norm_eps: float | None = None
    """Epsilon of norms after blocks; None: `norm_eps` (Muse Glimmer)."""
    sliding_rotary_dim: int | None = None
    """Leading dimensions of a head that rotate in sliding-window layers; None: as many as in the others."""
    sliding_rope_theta: float | None = None
    """Rope base of sliding-window layers, whose frequencies are then not scaled; None: that of the other layers."""
    attention_scale: float | None = None
    """Factor on query-key scores; None: 1 / sqrt(H)."""
    query_scaling: QueryScaling | None = None
    """Factor on queries that grows with their position; None: there is none."""
    has_position_scales: bool = False
    """True if each head, of an indexer too, has a factor on its queries: a number times ln(1 + position), plus one (Mistral Large 4)."""
    has_learned_frequencies: bool = False
    """True if each rotary frequency has a factor in the checkpoint, by its logarithm (Mistral Large 4)."""
    attention_softcap: float | None = None
    """c: a score s becomes c * tanh(s / c)."""
    output_gate: OutputGate = "none"
    gate_activation: GateActivation = "sigmoid"
    attention_out_scale: float = 1.0
    """Factor on the output of attention."""
    has_inner_norms: bool = False
    """True if the inputs of the output projection of attention, and of the last projection of feed-forward blocks, are normalised (BitNet)."""
    latent: LatentConfig | None = None
    """Widths of multi-head latent attention, which all layers then have; None: grouped-query attention."""
    compressed: CompressedConfig | None = None
    """Widths of attention to one vector per token, and to one for each block of tokens, which all layers then have; None: keys and
    values are two, or `latent`. `head_dim` is then that of the numbers that rotate."""
    value_dim: int | None = None
    """Numbers of a head's values, at most H; None: H. The cache has zeros after them (MiMo-V2-Flash)."""
    value_scale: float = 1.0
    """Factor on values."""
    sinks: Sinks = "none"
    embedding_scale: float = 1.0
    embedding_norm: EmbeddingNorm = "none"
    first_position_row: int | None = None
    """Row of the first position in a table of learned embeddings of positions, which are added to those of tokens (GPT-2: 0, OPT: 2); None: there is no table."""
    per_layer_dim: int | None = None  # P
    """Width of the embedding of each token that every layer gets beside the residual stream (Gemma 4); None: no layer has one."""
    has_per_layer_table: bool = True
    """False: these embeddings are projections of the tokens' own only (EmbeddingGemma 2)."""
    per_layer_vocab_size: int | None = None
    """Tokens that have such embeddings, the first ones; others have that of token 0. None: all V."""
    altup: AltUpConfig | None = None
    """Residual streams of alternating updates, which need `per_layer_dim`; None: there is one residual stream."""
    hyper: HyperConfig | None = None
    """Residual streams with hyper-connections; None: there is one residual stream, or those of `altup`."""
    laurel_rank: int | None = None
    """Rank of a learned augmented residual beside attention (Gemma 3n); None: there is none."""
    has_layer_scales: bool = False
    """True if each layer has a number in the checkpoint that its output is multiplied with (Gemma 4)."""
    has_residual_affine: bool = False
    """True if each dimension of a block's output, of what it is added to, and of embeddings has a bias and a factor (ZAYA)."""
    residual_scale: float = 1.0
    """Factor on each block's output."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    """Soft cap on logits after `logit_scale`, as `attention_softcap`."""
    logit_layer: HeadLayer | None = None
    """Layer between the final norm and the output head (ModernBERT's decoders); None: there is none."""
    lm_head_bias: bool = False
    """True if the output head has a bias (Phi-3.5-MoE)."""
    mlp_has_gate: bool = True
    """False: feed-forward blocks and experts compute down(activation(up(x)))."""
    mlp_clamp: ClampedGate | None = None
    """Gate of dense feed-forward blocks and of shared experts (MiniMax-M3); None: activation(gate) * up."""
    mlp_gate_scale: float = 1.0
    """Factor on the gate of feed-forward blocks, before its activation."""
    mlp_out_scale: float = 1.0
    tied_embeddings: bool = False
    """True if the output head is the embedding matrix."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    stored: CheckpointQuantization | None = None
    """Quantisation of the checkpoint; None: it is not quantised."""
    kv_copies: int = 1
    """Copies of each of the checkpoint's KV heads among the `num_kv_heads`: see `for_devices`."""
    tapped_layers: tuple[int, ...] = ()
    """Layers whose inputs a step returns for the head that drafts; L stands for the output of the last one."""
    eagle: EagleConfig | None = None
    """The inputs of an EAGLE-3 head, which this is a layer of; None: this is a model."""
    mtp: MTPConfig | None = None
    """The inputs of a multi-token-prediction layer, which this is; None: this is a model."""
    assistant: AssistantConfig | None = None
    """The inputs of a drafter of Gemma 4, which these are the layers of; None: this is a model."""
    vision: VisionConfig | None = None
    """Tower whose embeddings stand for images among the tokens; None: the model is served for texts."""
    is_bidirectional: bool = False
    """True if every token attends to those after it, too: such a model embeds, and generates nothing."""
    has_whole_prompts: bool = False
    """True if the tokens of a prompt attend to all of it, and only generated ones to those before them alone (PaliGemma)."""
    head: EmbeddingHead | None = None
    """Layers after the pooling of a text; None: there are none, as in models that generate."""
    splits_windows: bool = False
    """True: sliding-window layers have cache groups of their own, which keep only the window's pages, if other layers keep all. False: their cache is like that of the other layers, and only attention knows the window."""
    window_margin: int = 0
    """Tokens before a window that such groups keep as well, for a drafter that attends to them."""
    dflash: DFlashConfig | None = None
    """The inputs of a DFlash drafter, which these are the layers of; None: this is a model."""

    @property
    def cache(self) -> CacheLayout:
        """The cache groups, and each layer's places in them; those of a drafter of Gemma 4 are in groups of the model."""
        if self.assistant is not None:
            return CacheLayout((), self.assistant.places)
        windows = {layer.sliding_window for layer in self.layers if layer.has_kv}
        splits_windows = self.splits_windows and None in windows
        return cache_layout([self._layer_cache(layer, splits_windows=splits_windows) for layer in self.layers])

    def _layer_cache(self, layer: LayerConfig, *, splits_windows: bool) -> LayerCache:
        recurrent = layer.recurrent
        state = None if recurrent is None else CacheGroup("state", arrays=recurrent.arrays)
        if not layer.has_kv:
            return LayerCache(None, state) if layer.ngram is None else layer.ngram.layer_cache(state)
        if self.compressed is not None:
            return self.compressed.layer_cache(layer.compression, splits_windows=splits_windows)
        if layer.latent_dim is not None and self.latent is not None:
            stored = CacheGroup("latent", head_dim=layer.latent_dim)
            return LayerCache(stored, state, layer.kv_source, self.latent.index_cache, layer.index_source)
        is_split = splits_windows and layer.sliding_window is not None
        window = (layer.sliding_window or 0) + self.window_margin if is_split else None
        kind: Literal["full", "sliding"] = "full" if window is None else "sliding"
        own = CacheGroup(kind, (), *self.kv_shape(layer), window)
        return LayerCache(own, state, layer.kv_source, None if layer.blocks is None else layer.blocks.cache)

    def kv_shape(self, layer: LayerConfig) -> tuple[int, int]:
        """Return the KV heads of a layer with attention, and their dim."""
        return layer.num_kv_heads or self.num_kv_heads, layer.head_dim or self.head_dim

    @property
    def full_head_dim(self) -> int:
        """Head dim of layers with full attention; that of the others if there are none."""
        dims = (self.kv_shape(layer)[1] for layer in self.layers if layer.has_kv and layer.sliding_window is None)
        return next(dims, self.head_dim)

    @property
    def common_kv_heads(self) -> int:
        """Greatest common divisor of the layers' KV heads: as many devices can split all of them."""
        return math.gcd(self.num_kv_heads, *(layer.num_kv_heads or 0 for layer in self.layers))

    @property
    def kv_width(self) -> int:
        """Numbers of a token that a layer with attention reads from the cache, on average over such layers."""
        vector = self.compressed.dim if self.compressed is not None else self.latent and self.latent.width
        return vector or 2 * _mean(self, lambda heads, dim: heads * dim)

    @property
    def pair_width(self) -> int:
        """Multiplications of one layer for a query token and a token that it attends to, on average over such layers."""
        if self.latent is not None or self.compressed is not None:
            return 2 * self.num_heads * self.kv_width
        widths = [query_heads(self, layer) * self.kv_shape(layer)[1] for layer in self.layers if layer.has_kv]
        return 2 * sum(widths) // max(len(widths), 1)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_stored_kv_heads(self) -> int:
        """KV heads of the checkpoint."""
        return self.num_kv_heads // self.kv_copies

    @property
    def experts(self) -> ExpertsConfig | None:
        """Experts of the layers that have them; None in a dense model."""
        return next((layer.experts for layer in self.layers if layer.experts is not None), None)

    @property
    def num_expert_layers(self) -> int:
        """Layers with experts."""
        return sum(layer.experts is not None for layer in self.layers)

    @property
    def recurrent(self) -> RecurrentConfig | None:
        """The recurrent mixer of the layers that have one, all alike; None if there is none."""
        return next((layer.recurrent for layer in self.layers if layer.recurrent is not None), None)

    @property
    def spare_tensors(self) -> frozenset[str]:
        """Tensors a checkpoint may hold that are not loaded: a tied head, keys and values of layers that read others', and
        factors on the active stream that are not applied."""
        unused = {
            f"model.layers.{index}.self_attn.{name}.weight"
            for index, layer in enumerate(self.layers)
            if layer.kv_source is not None
            for name in ("k_proj", "v_proj", "k_norm")
        }
        if self.altup is not None and not self.altup.scales_active:
            unused |= {f"model.layers.{index}.altup.correct_output_scale" for index in range(self.num_layers)}
        return frozenset(unused | ({"lm_head.weight"} if self.tied_embeddings else set()))

    def with_context(self, max_model_len: int | None) -> DecoderConfig:
        """Return the config for a server whose longest text has `max_model_len` tokens; None: as declared.

        longrope rotates keys differently in texts longer than the original length, and cached keys keep their rotation:
        a server uses one set of divisors, and texts beyond the original length are served only on request. Texts that
        are no longer than a chunk are attended to as a whole.
        """
        if max_model_len is not None and not self.cache.has_attention:
            return replace(self, max_position=max(max_model_len, self.max_position))
        if max_model_len is not None and any(layer.is_chunked for layer in self.layers):
            return replace(self, layers=tuple(_unchunked(layer, max_model_len) for layer in self.layers))
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "longrope" or scaling.original_max_position is None:
            return self
        original = scaling.original_max_position
        return self if (max_model_len or 0) > original else replace(self, max_position=min(original, self.max_position))

    def for_devices(self, num_devices: int) -> DecoderConfig:
        """Return the config for a model whose heads `num_devices` devices split.

        If they are a multiple of the KV heads, and divide the query heads, every device gets one KV head: as many devices
        as share a KV head hold a copy of its weights and of its cache, and each attends with its own query heads.
        """
        if self.compressed is not None:
            return self  # there is one vector, which every device has
        num_heads = math.gcd(*head_counts(self))
        copies = _copies(self.num_stored_kv_heads, num_heads, num_devices)
        layers = tuple(_layer_for_devices(layer, num_heads, num_devices) for layer in self.layers)
        if copies == self.kv_copies and layers == self.layers:
            return self
        return replace(self, num_kv_heads=self.num_stored_kv_heads * copies, kv_copies=copies, layers=layers)


def query_heads(config: DecoderConfig, layer: LayerConfig) -> int:
    """Return the query heads of a layer with attention."""
    return layer.num_heads or config.num_heads


def indexer_of(config: DecoderConfig, layer: LayerConfig) -> IndexerConfig | BlockIndexerConfig | None:
    """Return the indexer that chooses what a layer with attention attends to; None: it attends to all tokens."""
    return layer.blocks if config.latent is None else config.latent.indexer


def head_counts(config: DecoderConfig) -> tuple[int, ...]:
    """Return the numbers of query heads that layers with attention have, ascending; the model's if there are none."""
    found = {query_heads(config, layer) for layer in config.layers if layer.has_kv}
    return tuple(sorted(found or {config.num_heads}))


def _unchunked(layer: LayerConfig, max_model_len: int) -> LayerConfig:
    is_whole = layer.is_chunked and layer.sliding_window is not None and max_model_len <= layer.sliding_window
    return replace(layer, sliding_window=None, is_chunked=False) if is_whole else layer


def _layer_for_devices(layer: LayerConfig, num_heads: int, num_devices: int) -> LayerConfig:
    if layer.num_kv_heads is None:
        return layer
    stored = layer.num_kv_heads // layer.kv_copies
    copies = _copies(stored, num_heads, num_devices)
    return replace(layer, num_kv_heads=stored * copies, kv_copies=copies)


def _copies(stored: int, num_heads: int, num_devices: int) -> int:
    return num_devices // stored if num_devices % stored == 0 and num_heads % num_devices == 0 else 1


def _mean(config: DecoderConfig, width: Callable[[int, int], int]) -> int:
    """Return the mean of a number that follows from KV heads and their dim, over the layers with attention."""
    widths = [width(*config.kv_shape(layer)) for layer in config.layers if layer.has_kv]
    return sum(widths) // max(len(widths), 1)
