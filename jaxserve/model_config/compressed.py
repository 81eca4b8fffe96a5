"""Attention over one vector per token inside a window, and one for each block of tokens before it, as data."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.model_config.cache import CacheGroup, LayerCache
from jaxserve.model_config.latent import IndexerConfig


@dataclass(frozen=True, slots=True)
class Compression:
    """Blocks of tokens that a layer's queries attend to beside the window, one vector for each (DeepSeek-V4)."""

    rate: int
    """Tokens of a block."""
    overlaps: bool
    """True: a block's vector is made of the block before, too."""
    indexer: IndexerConfig | None = None
    """Chooses blocks by keys that are made as their vectors are; None: queries attend to all."""

    @property
    def window(self) -> int:
        """Tokens that a block's vector is made of."""
        return self.rate * (2 if self.overlaps else 1)

    def scored_numbers(self, context: int) -> int:
        """Return the numbers of keys that the indexer reads for a query at the end of `context` tokens."""
        if self.indexer is None or context // self.rate <= self.indexer.num_chosen:
            return 0
        return context // self.rate * self.indexer.head_dim

    def parts(self, dim: int) -> int:
        """Return the numbers that a token adds to vectors of `dim` numbers, which have as many scores."""
        return dim * (2 if self.overlaps else 1)


@dataclass(frozen=True, slots=True)
class CompressedConfig:
    """Widths of attention whose heads all read one vector per token, key and value in one (DeepSeek-V4).

    A token is attended to by itself for as long as it is in the window, and as part of its block from the block's end on. What a
    head reads is rotated back by the query's position: a vector's last `rope_dim` numbers rotate.
    """

    dim: int  # H
    rope_dim: int
    query_rank: int
    """Width of compressed queries."""
    window: int
    """Tokens that a query attends to one by one, itself included."""
    num_groups: int
    """Groups of heads whose outputs a matrix each projects before the output projection."""
    group_rank: int
    """Width of what these matrices make."""

    def attended(self, compression: Compression | None, context: int) -> int:
        """Return the vectors that a query at the end of `context` tokens attends to."""
        num_blocks = 0 if compression is None else context // compression.rate
        if compression is not None and compression.indexer is not None:
            num_blocks = min(num_blocks, compression.indexer.num_chosen)
        return min(context, self.window) + num_blocks

    def layer_cache(self, compression: Compression | None, *, splits_windows: bool) -> LayerCache:
        """Return the storage of a layer. splits_windows: see `DecoderConfig.splits_windows`."""

        def vectors(width: int, window: int) -> CacheGroup:
            return CacheGroup("latent", head_dim=width, window=window if splits_windows else None)

        tokens = vectors(self.dim, self.window)
        if compression is None:
            return LayerCache(tokens)
        indexer, rate = compression.indexer, compression.rate
        dims = [self.dim, *([] if indexer is None else [indexer.head_dim])]
        return LayerCache(
            tokens,
            index=None if indexer is None else CacheGroup("index", head_dim=indexer.head_dim, rate=rate),
            added=vectors(2 * sum(map(compression.parts, dims)), compression.window),
            blocks=CacheGroup("compressed", head_dim=self.dim, rate=rate),
        )
