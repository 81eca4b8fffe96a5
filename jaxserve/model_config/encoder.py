"""Encoders of the BERT family, as data."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.model_config.activation import Activation
from jaxserve.model_config.embedding_head import EmbeddingHead


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """One encoder as in BERT (Devlin et al., arXiv 1810.04805). Letters as in DecoderConfig."""

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_heads: int  # N
    num_layers: int  # L
    num_positions: int
    """Rows of the position table; with rope, the positions that the model was trained for."""
    num_token_types: int
    """Rows of the table of token types; 0: there is none."""
    norm_eps: float
    activation: Activation = "gelu"
    first_position: int = 0
    """Row of the first token's position: RoBERTa's tables begin after the padding token's."""
    rope_theta: float | None = None
    """Base of the rotation of queries and keys, which then takes the place of the position table; None: there is the table."""
    num_relative_buckets: int = 0
    """Rows of the table of biases of scores by distance, which all layers share (MPNet); 0: there is none."""
    is_gated: bool = False
    """True if feed-forward blocks compute down(activation(gate(x)) * up(x))."""
    has_attention_bias: bool = True
    """True if the four projections of attention have a bias."""
    has_mlp_bias: bool = True
    """True if the matmuls into feed-forward blocks have a bias."""
    has_mlp_out_bias: bool = True
    """True if the matmul out of feed-forward blocks has a bias."""
    renames: tuple[tuple[str, str], ...] = ()
    """BERT's name by the checkpoint's, for components of tensor names, as in `Family.renames`."""
    head: EmbeddingHead | None = None
    """Layers after the pooling of a text, such as those of a cross-encoder; None: there are none."""

    @property
    def max_position(self) -> int:
        """Longest input the checkpoint has positions for."""
        return self.num_positions - self.first_position

    @property
    def head_dim(self) -> int:  # H
        return self.hidden_size // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Number of kv heads: encoders have no grouped queries."""
        return self.num_heads

    @property
    def spare_tensors(self) -> frozenset[str]:
        """Tensors a checkpoint may hold that are not loaded, such as a pooler that embeddings do not use."""
        return frozenset({"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"})
