"""Attention over latent vectors of the tokens that an indexer chooses (DeepSeek Sparse Attention, DeepSeek-V3.2).

`api` is what callers see: `write_and_choose` scores the tokens of a text for each query and chooses the best ones, and
`write_and_attend` attends to those. `choose_blocks` chooses blocks of tokens. `reference` has both in plain jax.numpy, and serves every platform.
"""

from jaxserve_kernels.sparse_attention.api import IndexQueries, choose_blocks, write_and_attend, write_and_choose

__all__ = ["IndexQueries", "choose_blocks", "write_and_attend", "write_and_choose"]
