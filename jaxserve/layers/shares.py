"""What each device computes with its share of a layer (tensor parallelism, Shoeybi et al., arXiv 1909.08053).

XLA partitions everything else by itself. It cannot split kernels, and left to itself it exchanges more than it has to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxserve.layers.param import Axes
from jaxserve.sharding.mesh import MODEL_AXIS


def num_shares(axis: str | None, split_axes: Collection[str]) -> int:
    """Devices of the mesh in context that a logical axis is split over; 1: every device has it whole."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.size if axis in split_axes and not mesh.empty else 1


def on_each_device(
    compute: Callable[..., jax.Array],
    operands: Sequence[tuple[Any, Axes]],
    axes: Axes,
    split_axes: Collection[str],
) -> jax.Array:
    """compute(*operands) by every device of the mesh in context, of its share of each.

    operands: arrays, or trees of them, with their logical axes. axes: of the result. split_axes: those that devices share.
    """
    values, operand_axes = zip(*operands, strict=True)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return compute(*values)

    def place(axes: Axes) -> PartitionSpec:
        return PartitionSpec(*(MODEL_AXIS if axis in split_axes else None for axis in axes))

    # Kernels do not say how their results vary: check_vma.
    shared = jax.shard_map(compute, in_specs=tuple(map(place, operand_axes)), out_specs=place(axes), check_vma=False)
    result: jax.Array = shared(*values)
    return result


def add_shares(part: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The sum of what all devices made, exchanged in `dtype`, half as many bytes as float32 where that has 16 bits."""
    total: jax.Array = jax.lax.psum(part.astype(dtype), MODEL_AXIS)
    return total.astype(part.dtype)
