"""Multi-head latent attention (MLA) of a decoder, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Widths of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1).

    The cache holds one vector per token, which all heads read: `rank` numbers that keys and values are made of, then
    `rope_dim` numbers of a key that rotates.
    """

    rank: int
    """Width of the compressed keys and values (`kv_lora_rank`)."""
    rope_dim: int
    """Dimensions of a head's query that rotate."""
    plain_dim: int
    """Dimensions of a head's query that do not rotate (`qk_nope_head_dim`)."""
    value_dim: int
    """Width of a head's value."""
    query_rank: int | None = None
    """Width of compressed queries; None: queries are not compressed."""

    @property
    def width(self) -> int:
        """Width of the vector that is cached."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Width of a head's query."""
        return self.plain_dim + self.rope_dim
