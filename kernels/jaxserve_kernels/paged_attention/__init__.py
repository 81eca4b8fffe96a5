"""Attention of query tokens over keys and values kept in pages.

`api` is what callers see; `reference` is the specification in plain jax.numpy, and serves every platform.
"""

from jaxserve_kernels.paged_attention.api import Ragged, decode_attention, mixed_attention, ragged_layout

__all__ = ["Ragged", "decode_attention", "mixed_attention", "ragged_layout"]
