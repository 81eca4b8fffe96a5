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
    """Rows of the position table."""
    num_token_types: int
    norm_eps: float
    activation: Activation = "gelu"
    first_position: int = 0
    """Row of the first token's position: RoBERTa's tables begin after the padding token's."""
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
