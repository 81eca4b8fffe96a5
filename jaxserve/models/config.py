"""What a model is, as data. A family turns a checkpoint's `config.json` into one of these.

Branch on these features, never on model names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from jaxserve.checkpoint.stored import Stored

Activation = Literal["silu", "gelu", "gelu_tanh"]
NormPlacement = Literal["before", "behind", "around"]
"""Of a block's norms: of what goes in (Llama), of what comes out (OLMo 2), of both (Gemma)."""
NormWeights = Literal["plain", "wide", "offset"]
"""plain: multiplied in the type of activations; wide: in float32; offset: in float32, and stored without their 1."""

RotaryPairs = Literal["halves", "adjacent"]
"""Which dimensions turn together: i and i + R / 2 (Llama), or 2 i and 2 i + 1 (GLM)."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts. Fields a kind does not use stay None.

    linear:  all frequencies / factor
    llama3:  https://github.com/meta-llama/llama-models (low frequencies / factor, smooth in between)
    yarn:    arXiv 2309.00071 (NTK-by-parts, with the attention factor)
    dynamic: NTK-aware base, which equals no scaling up to the declared length; more is not served
    longrope: arXiv 2402.13753 (a divisor for every frequency, with the attention factor)
    """

    kind: Literal["linear", "llama3", "yarn", "dynamic", "longrope"]
    factor: float
    original_max_position: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    truncate: bool | None = None
    """Whether the bounds between parts are whole dimensions."""
    short_divisors: tuple[float, ...] | None = None
    """For contexts of up to the original length: see `DecoderConfig.with_context`."""
    long_divisors: tuple[float, ...] | None = None
    """For longer ones."""


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gate * sigmoid(slope * gate) * (up + 1), with gates of at most `limit` and ups between it and its negative."""

    limit: float
    slope: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Of feed-forward blocks that are many small ones, of which each token takes a few."""

    num_experts: int  # E
    num_per_token: int
    """Those of the highest scores."""
    intermediate_size: int  # F
    """Of each expert."""
    is_normalized: bool
    """Whether the weights of those that a token takes add up to 1; otherwise those of all experts would."""
    has_biases: bool = False
    """Of the router and of every product of an expert."""
    clamp: ClampedGate | None = None
    """None: activation(gate) * up."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

    sliding_window: int | None = None
    """Tokens a query sees, itself included; None: all before it."""
    use_rope: bool = True
    """False: no positional encoding in this layer (SmolLM3's NoPE layers)."""
    experts: ExpertsConfig | None = None
    """Of its feed-forward block; None: it is one for all tokens. Layers that have experts have as many and as wide ones."""


@dataclass(frozen=True, slots=True)
class AdaptersConfig:
    """Adapters that are served with a model: how much room they have."""

    count: int
    rank: int
    """Of each; those of smaller ones are filled up with zeros."""
    modules: tuple[str, ...]
    """What any of them adds to, by names in checkpoints."""

    @property
    def num_ranks(self) -> int:
        """Of all together."""
        return self.count * self.rank


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder-only transformer. Letters: L layers, D model, N query heads, K kv heads, H head dim, F ffn, V vocab,
    E experts."""

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F, of layers without experts
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    layers: tuple[LayerConfig, ...]  # L
    max_position: int
    """Longest context the checkpoint declares, or that can be had of it: see `with_context`."""
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None  # R
    """How many dimensions of a head rotate: its first; None: all."""
    rotary_pairs: RotaryPairs = "halves"
    activation: Activation = "silu"
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "heads", "whole"] = "none"
    """RMSNorm of queries and keys before rope: over the H of each head (Qwen3), or over all heads together (OLMo 2)."""
    norm_placement: NormPlacement = "before"
    norm_weights: NormWeights = "plain"
    sliding_rope_theta: float | None = None
    """Of layers that slide, which then are not scaled; None: they rotate as the others."""
    attention_scale: float | None = None
    """On products of queries and keys; None: 1 / sqrt(H)."""
    attention_softcap: float | None = None
    """c: a score s becomes c * tanh(s / c)."""
    has_sinks: bool = False
    """Every head has a logit that takes its share of attention and gives nothing."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """On what a block adds."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    """As for scores, behind `logit_scale`."""
    tied_embeddings: bool = False
    """The output head is the embedding matrix."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    stored: Stored | None = None
    """Of a checkpoint whose matrices are quantised."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def experts(self) -> ExpertsConfig | None:
        """Of the layers that have some."""
        return next((layer.experts for layer in self.layers if layer.experts is not None), None)

    @property
    def spare_tensors(self) -> frozenset[str]:
        """What a checkpoint may hold and nobody reads."""
        return frozenset({"lm_head.weight"}) if self.tied_embeddings else frozenset()

    def with_context(self, max_model_len: int | None) -> DecoderConfig:
        """For a server whose longest text has so many tokens; None: as many as the model takes as it is.

        longrope turns keys otherwise in texts that are longer than the original length, and keys in a cache stay as they
        are: one server has one set of divisors, and texts beyond that length only where they are asked for.
        """
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "longrope" or scaling.original_max_position is None:
            return self
        original = scaling.original_max_position
        return self if (max_model_len or 0) > original else replace(self, max_position=min(original, self.max_position))


@dataclass(frozen=True, slots=True)
class ScoringHead:
    """What makes one number of a pair of texts: two layers over the first token's vector, and perhaps a sigmoid."""

    names: Literal["bert", "roberta"]
    """Whose names the two layers have: `pooler.dense` and `classifier`, or `classifier.dense` and `.out_proj`."""
    is_sigmoid: bool


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """One encoder as BERT has it (Devlin et al., arXiv 1810.04805). Letters as in DecoderConfig."""

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_heads: int  # N
    num_layers: int  # L
    num_positions: int
    """Rows of the table of positions."""
    num_token_types: int
    norm_eps: float
    activation: Activation = "gelu"
    first_position: int = 0
    """Row of the first token's position: RoBERTa's tables begin behind the padding token's."""
    scoring: ScoringHead | None = None
    """Of a cross-encoder; None: its output are the tokens' vectors."""

    @property
    def max_position(self) -> int:
        """Longest input the checkpoint has positions for."""
        return self.num_positions - self.first_position

    @property
    def head_dim(self) -> int:  # H
        return self.hidden_size // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Every query head has its own."""
        return self.num_heads

    @property
    def spare_tensors(self) -> frozenset[str]:
        """What a checkpoint may hold and nobody reads: a head over the first token, which embeddings do without."""
        pooler = {"pooler.dense.weight", "pooler.dense.bias"} if self.scoring is None else set()
        return frozenset({"embeddings.position_ids", *pooler})
