"""The implementations of ops. Static: a program is traced with one of them."""

from __future__ import annotations

from typing import Final, Literal

Backend = Literal[
    "reference",
    "bucketed",
    "native",
    "native_matrix",
    "mosaic_gpu",
    "mosaic_gpu_mma",
    "mosaic_gpu_tcgen05",
    "mosaic_tpu",
]
"""reference: plain jax.numpy, on every platform. bucketed: the same, with decode attention in buckets of context instead of
a loop, for GPUs. native: this package's C++ for CPUs, if it was built.
native_matrix: native, with float matmuls on AMX.
mosaic_gpu, mosaic_tpu: Pallas kernels for Hopper and for TPUs. mosaic_gpu_mma: attention by Pallas on `mma.sync` and
`cp.async`, for other GPUs from compute capability 8.0 on. mosaic_gpu_tcgen05: the same for single queries, and segments on
`tcgen05.mma`, for compute capability 10.x. An op without a kernel for a backend takes the reference."""

NATIVE: Final = frozenset({"native", "native_matrix"})
"""The backends in C++ for CPUs."""
XLA: Final = frozenset({"reference", "bucketed"})
"""The backends without kernels of this package."""
