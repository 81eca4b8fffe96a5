"""An indexer that chooses blocks of tokens for grouped-query attention, as data."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.model_config.cache import CacheGroup


@dataclass(frozen=True, slots=True)
class BlockIndexerConfig:
    """An indexer that chooses the blocks of tokens that a query attends to, for each KV head (MiniMax-M3) or for all (Qwen4-Exp).

    It has queries of several heads, and one key per token, which the cache holds. Each head chooses for as many KV heads as others:
    a block's score is the largest product of its query and the key of a token in it that the query sees.

    If `is_pooled`, all heads choose together among whole blocks: the key of a block is the mean of those of its tokens, which is then
    normalised, and rotated as the first of them. Its score is the sum of its products with all queries that are above 0. A query attends to the tokens after the last
    whole block, too.
    """

    num_heads: int
    """Heads of queries: a divisor of the KV heads if not `is_pooled`."""
    head_dim: int
    """Width of a key, whose first dimensions rotate as those of the attention's keys do."""
    block_size: int
    """Tokens of a block."""
    num_blocks: int
    """Blocks that are chosen; queries with fewer before them attend to all of these."""
    num_local: int
    """The last blocks, of which the query's own is one, that are always chosen: at most `num_blocks`; none if `is_pooled`."""
    is_pooled: bool = False

    @property
    def num_chosen(self) -> int:
        """Tokens that a query attends to at most."""
        return self.block_size * self.num_blocks + (self.block_size - 1 if self.is_pooled else 0)

    @property
    def cache(self) -> CacheGroup:
        """Cache of the indexer's keys."""
        return CacheGroup("index", head_dim=self.head_dim)
