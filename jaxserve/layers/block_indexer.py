"""The indexer of block-sparse attention (MiniMax-M3)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.block_sparse_attention import BlockChoice
from jaxserve_kernels.rope import Rotation, rotate
from jaxtyping import Array, Float

from jaxserve.layers.linear import Linear, Tokens
from jaxserve.layers.norm import norm_of
from jaxserve.layers.policy import DtypePolicy
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

    def __call__(
        self, x: Float[Array, "T D"], tokens: Tokens, rotation: Rotation | None
    ) -> tuple[Float[Array, "T J I"], Float[Array, "T I"]]:
        """Return the rotated queries and keys of the tokens."""
        query = self.q_norm(self.q_proj(x, tokens).reshape(len(x), self.num_heads, -1))
        key = self.k_norm(self.k_proj(x, tokens))[:, None]
        return self._rotated(query, rotation), self._rotated(key, rotation)[:, 0]

    def _rotated(self, x: Float[Array, "T J I"], rotation: Rotation | None) -> Float[Array, "T J I"]:
        """Return queries or keys whose first dimensions are rotated, as halves of those alone: checkpoints' order of dimensions stays."""
        if rotation is None:
            return x
        turning, plain = jnp.split(x, [self.rotary_dim], -1)
        pairs = Rotation(*(each[:, : self.rotary_dim // 2] for each in rotation))
        return jnp.concatenate([rotate(turning, pairs), plain], -1)
