"""Multi-head latent attention (MLA) of a decoder, as data."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.model_config.cache import CacheGroup


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """An indexer that chooses the tokens that a query attends to (DeepSeek-V3.2, arXiv 2512.02556, 2.1).

    It has queries of several heads, and one key per token, which the cache holds. A token's score is the sum over heads of a
    weight times the product of query and key, or zero where that is negative.
    """

    num_heads: int
    head_dim: int
    """Width of a key, whose first dimensions rotate as those of the attention's keys do: `LatentConfig.rope_dim`."""
    num_chosen: int
    """Tokens that are chosen; queries with fewer before them attend to all of these."""
    has_adjacent_pairs: bool
    """True: dimensions 2 i and 2 i + 1 rotate together (GLM-5); False: i and i + R / 2 (DeepSeek-V3.2)."""
    reads_inputs: bool = False
    """True: queries are made of the layer's input after a LayerNorm (Mistral Large 4); False: of compressed queries."""
    pool_size: int = 1
    """Consecutive tokens that have one key, a weighted sum of theirs, and are chosen together; the tokens after the last whole pool
    are always attended to (GLM-5.3). `num_chosen` counts these, too: a multiple, and `pool_size` - 1 more."""
    rotates_last: bool = False
    """True: the last dimensions of a key rotate instead of the first (Hy4)."""
    norm_eps: float = 1e-6
    """Epsilon of the norm of keys."""

    @property
    def cached_width(self) -> int:
        """Numbers of a token in the cache: its key, and its gates if tokens share keys."""
        return self.head_dim * (1 if self.pool_size == 1 else 2)


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
    has_gate: bool = False
    """True if compressed queries, normalised ones and then themselves, make a gate of each head's values beside its query
    (A.X-K2)."""
    norm_eps: float = 1e-6
    """Epsilon of the norms of compressed queries, keys and values."""
    has_own_keys_without_rope: bool = False
    """True: in layers without rope all dimensions of a head's key are made of the compressed keys, and the cached vector has zeros
    in place of the key that rotates (Mistral Large 4)."""
    indexer: IndexerConfig | None = None
    """Indexer of the layers; None: queries attend to all tokens before them."""

    @property
    def width(self) -> int:
        """Width of the vector that is cached."""
        return self.rank + self.rope_dim

    @property
    def index_cache(self) -> CacheGroup | None:
        """Cache of a layer's indexer; None without one."""
        return None if self.indexer is None else CacheGroup("index", head_dim=self.indexer.cached_width)

    @property
    def query_dim(self) -> int:
        """Width of a head's query."""
        return self.plain_dim + self.rope_dim
