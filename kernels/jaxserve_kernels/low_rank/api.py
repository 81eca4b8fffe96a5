"""Public entry of low-rank additions. Letters: T tokens, I inputs, O outputs, A ranks of all adapters."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jaxtyping import Array, Bool, Float, Int

from jaxserve_kernels.backend import NATIVE, Backend
from jaxserve_kernels.low_rank import cpu, reference

__all__ = ["add_low_rank", "has_kernel"]


def has_kernel(x: jax.Array, down: jax.Array, up: jax.Array, backend: Backend) -> bool:
    """Return True if a kernel of the backend computes this addition."""
    return backend in NATIVE and cpu.supports(x, down, up)


def add_low_rank(
    ys: Sequence[Float[Array, "T _"]],
    x: Float[Array, "T I"],
    downs: Sequence[Float[Array, "A I"]],
    ups: Sequence[Float[Array, "A _"]],
    own: Bool[Array, "T A"],
    num_rows: Int[Array, ""],
    *,
    backend: Backend = "reference",
) -> list[Float[Array, "T _"]]:
    """y + where(own, x @ down.T, 0) @ up of each y, in float32; the ranks in between are rounded to the dtype of x.

    own: True for the ranks of each token's adapter, which are neighbours and a multiple of 4; a row without any is y to the
    bit. num_rows: rows after these are padding, whose results have no meaning; a backend may skip them. The native kernel
    reads the ranks that rows have, for all y in one call, and a row's result does not depend on its neighbours.
    """
    pairs = list(zip(downs, ups, strict=True))
    is_one_type = len({down.dtype for down in downs}) == 1
    if is_one_type and all(has_kernel(x, down, up, backend) for down, up in pairs):
        return cpu.add_low_rank(ys, x, downs, ups, own, num_rows)
    return [reference.add_low_rank(y, x, down, up, own) for y, (down, up) in zip(ys, pairs, strict=True)]
