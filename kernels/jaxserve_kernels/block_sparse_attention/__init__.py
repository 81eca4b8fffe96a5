"""Grouped-query attention to the blocks of tokens that an indexer chooses for each KV head (MiniMax-M3) or for all (Qwen4-Exp).

`api` is what callers see: `write_and_attend` writes a step's tokens, chooses blocks for each of them, and attends to those.
`reference` has both in plain jax.numpy, and serves every platform.
"""

from jaxserve_kernels.block_sparse_attention.api import BlockChoice, BlockKeys, IndexOperands, write_and_attend

__all__ = ["BlockChoice", "BlockKeys", "IndexOperands", "write_and_attend"]
