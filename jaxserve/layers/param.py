"""Declarations of parameters: shape, dtype and logical axes; nothing is allocated.

Modules are schema and forward code. Their parameters are built under `nnx.eval_shape`, so a
declaration costs no memory; the loader fills them by their path, which is the checkpoint's name.

Logical axes: "vocab", "embed" (D), "heads" (N*H), "kv_heads" (K*H), "ffn" (F), "experts" (E),
"expert_ffn" (F of each expert), "shared_ffn" (F of the shared expert), "delta_heads" (heads of gated
delta nets, with their channels), None (never split).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

import jaxserve.quant.pytree  # noqa: F401  (registers QuantArray)
from jaxserve.quant.array import ArraySpec, QuantArray
from jaxserve.sharding.rules import Axes


@dataclass(frozen=True, slots=True)
class FusedLayout:
    """Row order of several matrices in one array. A checkpoint has them apart, or one after the other in one tensor."""

    counts: tuple[int, ...]
    """Rows of each matrix."""
    groups: int = 1
    """Groups of rows, each with an equal share of every matrix, in their order. As many devices can split the array, and
    each then holds the same rows of each matrix as without fusion."""

    def join(self, parts: Iterable[Sequence[np.ndarray]]) -> tuple[np.ndarray, ...]:
        """Return the arrays of the fused matrix from those of each matrix; only one of the parts is held at a time."""
        joined: tuple[np.ndarray, ...] = ()
        for (start, end), part in zip(self._bounds(), parts, strict=True):
            joined = joined or tuple(np.empty((sum(self.counts), *each.shape[1:]), each.dtype) for each in part)
            for whole, own in zip(joined, part, strict=True):
                grouped = whole.reshape(self.groups, -1, *whole.shape[1:])
                grouped[:, start:end] = own.reshape(self.groups, -1, *own.shape[1:])
        return joined

    def split(self, y: Float[Array, "T O"]) -> list[Float[Array, "T _"]]:
        """Split the result of the fused matmul into those of its matrices."""
        grouped = y.reshape(y.shape[0], -1, sum(self.counts) // self.groups)  # a device may hold only one group
        return [grouped[..., start:end].reshape(y.shape[0], -1) for start, end in self._bounds()]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each matrix in a group."""
        return tuple(count // self.groups for count in self.counts)

    def _bounds(self) -> Iterator[tuple[int, int]]:
        """Return first row and end of each matrix within a group."""
        return itertools.pairwise(itertools.accumulate(self.sizes, initial=0))


def parameter(shape: tuple[int, ...], axes: Axes, dtype: jnp.dtype) -> nnx.Param[jax.Array]:
    """Declare one parameter with a logical name per dimension."""
    if len(shape) != len(axes):
        raise ValueError(f"{len(shape)} dimensions {shape} but {len(axes)} axes {axes}")
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes)


def matrix_parameter(declared: QuantArray[ArraySpec]) -> nnx.Param[QuantArray[jax.Array]]:
    """Declare a weight matrix as its format stores it: one parameter of several arrays."""
    arrays = declared.map(lambda spec: jnp.zeros(spec.shape, spec.dtype))
    return nnx.Param(arrays, axes=declared.map(lambda spec: spec.axes))


def array_axes(parameter: nnx.Variable[Any]) -> tuple[Axes, ...]:
    """Return the logical axes of each array of a parameter."""
    axes = parameter.get_metadata()["axes"]
    return axes.arrays if isinstance(axes, QuantArray) else (axes,)
