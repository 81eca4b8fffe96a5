"""Public entry of low-rank additions. Letters: T tokens, I inputs, O outputs, A ranks of all adapters."""

from __future__ import annotations

import jax
from jaxtyping import Array, Bool, Float, Int

from jaxserve_kernels.backend import NATIVE, Backend
from jaxserve_kernels.low_rank import cpu, reference

__all__ = ["add_low_rank", "has_kernel"]


def has_kernel(x: jax.Array, down: jax.Array, up: jax.Array, backend: Backend) -> bool:
    """Return True if a kernel of the backend computes this addition."""
    return backend in NATIVE and cpu.supports(x, down, up)


def add_low_rank(
    y: Float[Array, "T O"],
    x: Float[Array, "T I"],
    down: Float[Array, "A I"],
    up: Float[Array, "A O"],
    own: Bool[Array, "T A"],
    num_rows: Int[Array, ""],
    *,
    backend: Backend = "reference",
) -> Float[Array, "T O"]:
    """y + where(own, x @ down.T, 0) @ up, in float32; the ranks in between are rounded to the dtype of x.

    own: True for the ranks of each token's adapter, which are neighbours and a multiple of 4; a row without any is y to the
    bit. num_rows: rows after these are padding, whose results have no meaning; a backend may skip them. The native kernel
    reads the ranks that rows have, and a row's result does not depend on its neighbours.
    """
    if has_kernel(x, down, up, backend):
        return cpu.add_low_rank(y, x, down, up, own, num_rows)
    return reference.add_low_rank(y, x, down, up, own)
