"""Attention over latent vectors in pages (MLA): one vector per token, of which all heads make their keys and their values.

`api` is what callers see; `reference` is the specification in plain jax.numpy, and serves every platform; `buckets` is decode
attention for GPUs by XLA, and `gpu` the Pallas kernel for Hopper. Pages, parts of rows and splits over devices are those of
`paged_attention`.
"""

from jaxserve_kernels.latent_attention.api import unsupported, write_and_attend

__all__ = ["unsupported", "write_and_attend"]
