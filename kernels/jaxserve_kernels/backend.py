"""Which implementation of an op a program is traced with. Static: a program has one for good."""

from __future__ import annotations

from typing import Final, Literal

Backend = Literal["reference", "native", "native_matrix", "mosaic_gpu", "mosaic_tpu"]
"""reference: plain jax.numpy, on every platform. native: this package's C++ for CPUs, where it was built.
native_matrix: the same, with products of floats on the processor's matrix unit (AMX).
mosaic_gpu, mosaic_tpu: Pallas kernels for Hopper and for TPUs. An op that has nothing of a backend's own takes the
reference."""

NATIVE: Final = frozenset({"native", "native_matrix"})
"""Those of them that are C++ for CPUs."""
