"""What a model is, as data. A family turns a checkpoint's `config.json` into one of these.

Branch on these features, never on model names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts. Fields a kind does not use stay None.

    linear:  all frequencies / factor
    llama3:  https://github.com/meta-llama/llama-models (low frequencies / factor, smooth in between)
    yarn:    arXiv 2309.00071 (NTK-by-parts, with the attention factor)
    dynamic: NTK-aware base, which equals no scaling up to the declared length; more is not served
    """

    kind: Literal["linear", "llama3", "yarn", "dynamic"]
    factor: float
    original_max_position: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

    sliding_window: int | None = None
    """Tokens a query sees, itself included; None: all before it."""
    use_rope: bool = True
    """False: no positional encoding in this layer (SmolLM3's NoPE layers)."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder-only transformer. Letters: L layers, D model, N query heads, K kv heads, H head dim, F ffn, V vocab."""

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    layers: tuple[LayerConfig, ...]  # L
    max_position: int
    """Longest context the checkpoint declares."""
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    activation: Activation = "silu"
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over H on each query and key head before rope (Qwen3)."""
    tied_embeddings: bool = False
    """The output head is the embedding matrix."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def spare_tensors(self) -> frozenset[str]:
        """What a checkpoint may hold and nobody reads."""
        return frozenset({"lm_head.weight"}) if self.tied_embeddings else frozenset()


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
