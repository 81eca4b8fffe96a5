"""What each device computes with its share of a layer (tensor parallelism, Shoeybi et al., arXiv 1909.08053) or a batch.

XLA partitions everything else by itself. It cannot split kernels, and left to itself it exchanges more than it has to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxserve.sharding.mesh import MODEL_AXIS

Axes = tuple[str | None, ...]
R = TypeVar("R")


def num_shares(axis: str | None, split_axes: Collection[str]) -> int:
    """Devices of the mesh in context that a logical axis is split over; 1: every device has it whole."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.size if axis in split_axes and not mesh.empty else 1


def on_each_device(
    compute: Callable[..., R],
    operands: Sequence[tuple[Any, Axes]],
    axes: Axes,
    split_axes: Collection[str],
) -> R:
    """compute(*operands) by every device of the mesh in context, of its share of each.

    operands: arrays, or trees of them, with their logical axes, or the first of them. axes: of the result. split_axes:
    those that devices share.
    """
    values, operand_axes = zip(*operands, strict=True)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return compute(*values)

    def place(axes: Axes) -> PartitionSpec:
        return PartitionSpec(*(MODEL_AXIS if axis in split_axes else None for axis in axes))

    # Kernels do not say how their results vary: check_vma.
    shared = jax.shard_map(compute, in_specs=tuple(map(place, operand_axes)), out_specs=place(axes), check_vma=False)
    result: R = shared(*values)
    return result


def on_own_rows(
    compute: Callable[..., R],
    logits: jax.Array,
    by_row: Sequence[Any],
    whole: Sequence[Any],
    split_axes: Collection[str],
) -> R:
    """compute(logits, *by_row, *whole) by every device of the mesh in context, of its part of the rows.

    logits: `[B, V]`, whose columns devices may share until they are exchanged for rows. by_row: arrays, or trees of
    them, and so the result, of which rows come first. Where rows do not divide, every device computes all of them.
    """
    mesh, num_rows = jax.sharding.get_abstract_mesh(), len(logits)
    if mesh.empty or mesh.size == 1 or num_rows % mesh.size:
        return on_each_device(compute, [(each, ()) for each in (logits, *by_row, *whole)], (), ())

    # All but the logits is whole before and behind: XLA would otherwise split what is far from here by rows, too.
    def of_own(logits: jax.Array, by_row: Sequence[Any], whole: Sequence[Any]) -> R:
        share = num_rows // mesh.size
        start = jax.lax.axis_index(MODEL_AXIS) * share

        def own(each: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(each, start, share)

        if num_shares("vocab", split_axes) > 1:
            logits = jax.lax.all_to_all(logits, MODEL_AXIS, split_axis=0, concat_axis=1, tiled=True)
        else:
            logits = own(logits)
        made = compute(logits, *jax.tree.map(own, by_row), *whole)
        together: R = jax.tree.map(lambda part: jax.lax.all_gather(part, MODEL_AXIS, tiled=True), made)
        return together

    operands = [(logits, (None, "vocab")), (tuple(by_row), ()), (tuple(whole), ())]
    return on_each_device(of_own, operands, (), split_axes)


def add_shares(part: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The sum of what all devices made, exchanged in `dtype`, half as many bytes as float32 where that has 16 bits."""
    total: jax.Array = jax.lax.psum(part.astype(dtype), MODEL_AXIS)
    return total.astype(part.dtype)
