"""Which implementation of an op a program is traced with. Static: a program has one for good."""

from __future__ import annotations

from typing import Literal

Backend = Literal["reference", "native"]
"""reference: plain jax.numpy, on every platform. native: this package's C++ for CPUs, where it was built."""
