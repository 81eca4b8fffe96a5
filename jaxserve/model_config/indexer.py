"""An indexer that chooses blocks of tokens for grouped-query attention, as data."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.model_config.cache import CacheGroup


@dataclass(frozen=True, slots=True)
class BlockIndexerConfig:
    """An indexer that chooses the blocks of tokens that a query attends to, for each KV head (MiniMax-M3).

    It has queries of several heads, each for as many KV heads, and one key per token, which the cache holds. A block's score is
    the largest product of the query and the key of a token in it that the query sees.
    """

    num_heads: int
    """Heads of queries: a divisor of the KV heads."""
    head_dim: int
    """Width of a key, whose first dimensions rotate as those of the attention's keys do."""
    block_size: int
    """Tokens of a block."""
    num_blocks: int
    """Blocks that are chosen; queries with fewer before them attend to all of these."""
    num_local: int
    """The last blocks, of which the query's own is one, that are always chosen: at most `num_blocks`."""

    @property
    def num_chosen(self) -> int:
        """Tokens that a query attends to at most."""
        return self.block_size * self.num_blocks

    @property
    def cache(self) -> CacheGroup:
        """Cache of the indexer's keys."""
        return CacheGroup("index", head_dim=self.head_dim)
