"""The implementations of ops. Static: a program is traced with one of them."""

from __future__ import annotations

from typing import Final, Literal

Backend = Literal["reference", "native", "native_matrix", "mosaic_gpu", "mosaic_tpu"]
"""reference: plain jax.numpy, on every platform. native: this package's C++ for CPUs, if it was built.
native_matrix: native, with float matmuls on AMX.
mosaic_gpu, mosaic_tpu: Pallas kernels for Hopper and for TPUs. An op without a kernel for a backend takes the
reference."""

NATIVE: Final = frozenset({"native", "native_matrix"})
"""The backends in C++ for CPUs."""
