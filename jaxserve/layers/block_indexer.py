"""Indexers of block-sparse attention (MiniMax-M3, Qwen4-Exp)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.block_sparse_attention import BlockChoice, BlockKeys, IndexOperands
from jaxserve_kernels.rope import Rotation, rotate
from jaxtyping import Array, Float, Int, Num

from jaxserve.layers.linear import Linear, Tokens
from jaxserve.layers.norm import RMSNorm, norm_of
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.rope import rotation as rotation_at
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.indexer import BlockIndexerConfig


class BlockIndexer(nnx.Module):
    """Queries and keys of an indexer: projections of the layer's input, norms over each head as attention has them, rotation.

    All devices compute all of it. The scores have no factor, which would not change what is chosen.
    """

    def __init__(self, config: DecoderConfig, indexer: BlockIndexerConfig, policy: DtypePolicy) -> None:
        d, width = config.hidden_size, indexer.head_dim
        self.q_proj = Linear(indexer.num_heads * width, d, (None, "embed"), policy)
        self.k_proj = Linear(width, d, (None, "embed"), policy)
        self.q_norm, self.k_norm = (
            norm_of(config.qk_norm_kind, width, config, policy, weights=config.qk_norm_weights) for _ in range(2)
        )
        self.num_heads, self.rotary_dim = indexer.num_heads, config.rotary_dim or config.full_head_dim
        self.choice = BlockChoice(indexer.block_size, indexer.num_blocks, indexer.num_local)

    def operands(
        self,
        x: Float[Array, "T D"],
        tokens: Tokens,
        rotation: Rotation | None,
        pages: Num[Array, "L P 1 S I"],
        layer: Int[Array, ""],
        num_pages: int,
    ) -> IndexOperands:
        """Return the rotated queries and keys of the tokens, and the place of the others' keys. num_pages: of a row at most."""
        query = self.q_norm(self.q_proj(x, tokens).reshape(len(x), self.num_heads, -1))
        key = self.k_norm(self.k_proj(x, tokens))[:, None]
        queries, keys = (_rotated(each, rotation, self.rotary_dim) for each in (query, key))
        return IndexOperands(queries, keys[:, 0], pages, layer)


class PooledIndexer(nnx.Module):
    """Queries of an indexer, normalised and rotated, and keys as they are projected, of which those of blocks are made as they are scored.

    All devices compute all of it. The scores have no factor, which would not change what is chosen.
    """

    def __init__(self, config: DecoderConfig, indexer: BlockIndexerConfig, policy: DtypePolicy) -> None:
        width = indexer.head_dim
        self.qk_proj = Linear((indexer.num_heads + 1) * width, config.hidden_size, (None, "embed"), policy)
        self.q_norm, self.k_norm = (RMSNorm(width, config.norm_eps, policy, config.norm_weights) for _ in range(2))
        self.config, self.num_heads = config, indexer.num_heads
        self.rotary_dim = config.rotary_dim or config.full_head_dim
        self.choice = BlockChoice(indexer.block_size, indexer.num_blocks, num_local=0, is_pooled=True)

    def operands(
        self,
        x: Float[Array, "T D"],
        tokens: Tokens,
        rotation: Rotation | None,
        pages: Num[Array, "L P 1 S I"],
        layer: Int[Array, ""],
        num_pages: int,
    ) -> IndexOperands:
        """Return the rotated queries and the keys of the tokens, the place of the others' keys, and how keys of blocks are made.

        num_pages: of a row at most.
        """
        heads = self.qk_proj(x, tokens).reshape(len(x), self.num_heads + 1, -1)
        query = _rotated(self.q_norm(heads[:, :-1]), rotation, self.rotary_dim)
        turns = None
        if rotation is not None:
            starts = jnp.arange(num_pages * pages.shape[3] // self.choice.size) * self.choice.size
            turns = _pairs(rotation_at(self.config, starts), self.rotary_dim)
        keys = BlockKeys(self.k_norm.factors, jnp.float32(self.k_norm.eps), turns)
        return IndexOperands(query, heads[:, -1], pages, layer, keys)


def block_indexer(
    config: DecoderConfig, indexer: BlockIndexerConfig, policy: DtypePolicy
) -> BlockIndexer | PooledIndexer:
    """Return the indexer of a layer."""
    return (PooledIndexer if indexer.is_pooled else BlockIndexer)(config, indexer, policy)


def _rotated(x: Float[Array, "T J I"], rotation: Rotation | None, rotary_dim: int) -> Float[Array, "T J I"]:
    """Return queries or keys whose first dimensions are rotated, as halves of those alone: checkpoints' order of dimensions stays."""
    if rotation is None:
        return x
    turning, plain = jnp.split(x, [rotary_dim], -1)
    return jnp.concatenate([rotate(turning, _pairs(rotation, rotary_dim)), plain], -1)


def _pairs(rotation: Rotation, rotary_dim: int) -> Rotation:
    """Return the rotation of the dimensions that turn."""
    return Rotation(*(each[:, : rotary_dim // 2] for each in rotation))
