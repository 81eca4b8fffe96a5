"""Attention over one vector per token inside a window, and over one vector for each block of tokens before (DeepSeek-V4).

`api` is what callers see: `write` puts vectors into pages, `compress` makes the vectors of the blocks that end in a step, and
`write_and_attend` attends to the window and to the blocks in one softmax. `reference` has all in plain jax.numpy, and serves every
platform.
"""

from jaxserve_kernels.compressed_attention.api import closing_tokens, compress, write, write_and_attend, write_blocks
from jaxserve_kernels.compressed_attention.reference import Closing, Compressed, Mixture

__all__ = [
    "Closing",
    "Compressed",
    "Mixture",
    "closing_tokens",
    "compress",
    "write",
    "write_and_attend",
    "write_blocks",
]
