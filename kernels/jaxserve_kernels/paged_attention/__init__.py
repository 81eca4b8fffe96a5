"""Attention of query tokens over keys and values kept in pages.

`api` is what callers see; `reference` is the specification in plain jax.numpy, and serves every platform;
`cpu` calls the native kernel, `gpu` and `tpu` hold the Pallas kernels for Hopper and for TPUs.
"""

from jaxserve_kernels.paged_attention.api import (
    Paging,
    Ragged,
    Scoring,
    ShardAxes,
    decode_attention,
    is_native,
    mixed_attention,
    pool_heads,
    ragged_layout,
    unsupported,
    write,
    write_and_attend,
)

__all__ = [
    "Paging",
    "Ragged",
    "Scoring",
    "ShardAxes",
    "decode_attention",
    "is_native",
    "mixed_attention",
    "pool_heads",
    "ragged_layout",
    "unsupported",
    "write",
    "write_and_attend",
]
