"""Which implementation of an op a program is traced with. Static: a program has one for good."""

from __future__ import annotations

from typing import Literal

Backend = Literal["reference", "native", "mosaic_gpu", "mosaic_tpu"]
"""reference: plain jax.numpy, on every platform. native: this package's C++ for CPUs, where it was built.
mosaic_gpu, mosaic_tpu: Pallas kernels for Hopper and for TPUs. An op that has nothing of a backend's own takes the
reference."""
