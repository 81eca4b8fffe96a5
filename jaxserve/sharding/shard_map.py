"""Collectives written by hand: tensor-parallel parts of a layer (Shoeybi et al., arXiv 1909.08053) and of a batch.

XLA partitions everything else. It cannot partition kernels, and its own choices exchange more than is necessary.
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


def num_shards(axis: str | None, split_axes: Collection[str]) -> int:
    """Return the number of devices a logical axis is split over; 1 if every device holds all of it."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.size if axis in split_axes and not mesh.empty else 1


def sharded(
    compute: Callable[..., R], operands: Sequence[tuple[Any, Axes]], axes: Axes, split_axes: Collection[str]
) -> R:
    """Run compute(*operands) under `jax.shard_map` on the mesh in context; without one, run it directly.

    operands: arrays or pytrees, each with its (leading) logical axes. axes: logical axes of the result. split_axes:
    logical axes that are split over the devices.
    """
    values, operand_axes = zip(*operands, strict=True)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return compute(*values)

    def place(axes: Axes) -> PartitionSpec:
        return PartitionSpec(*(MODEL_AXIS if axis in split_axes else None for axis in axes))

    # Kernels do not declare how their results vary over the mesh: check_vma.
    mapped = jax.shard_map(compute, in_specs=tuple(map(place, operand_axes)), out_specs=place(axes), check_vma=False)
    result: R = mapped(*values)
    return result


def batch_sharded(
    compute: Callable[..., R],
    logits: jax.Array,
    by_row: Sequence[Any],
    whole: Sequence[Any],
    split_axes: Collection[str],
) -> R:
    """Run compute(logits, *by_row, *whole) with the rows of the batch split over the devices of the mesh in context.

    logits: `[B, V]`; if columns are split, an all-to-all exchanges them for rows. by_row: arrays or pytrees whose first
    axis is B, as in the result. If B does not divide by the mesh size, every device computes all rows.
    """
    mesh, num_rows = jax.sharding.get_abstract_mesh(), len(logits)
    if mesh.empty or mesh.size == 1 or num_rows % mesh.size:
        return sharded(compute, [(each, ()) for each in (logits, *by_row, *whole)], (), ())

    # Everything but the logits is replicated before and after: otherwise XLA would split distant arrays by rows, too.
    def compute_shard(logits: jax.Array, by_row: Sequence[Any], whole: Sequence[Any]) -> R:
        shard_rows = num_rows // mesh.size
        start = jax.lax.axis_index(MODEL_AXIS) * shard_rows

        def shard(each: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(each, start, shard_rows)

        if num_shards("vocab", split_axes) > 1:
            logits = jax.lax.all_to_all(logits, MODEL_AXIS, split_axis=0, concat_axis=1, tiled=True)
        else:
            logits = shard(logits)
        parts = compute(logits, *jax.tree.map(shard, by_row), *whole)
        gathered: R = jax.tree.map(lambda part: jax.lax.all_gather(part, MODEL_AXIS, tiled=True), parts)
        return gathered

    operands = [(logits, (None, "vocab")), (tuple(by_row), ()), (tuple(whole), ())]
    return sharded(compute_shard, operands, (), split_axes)


def all_reduce(part: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the sum of every device's `part`, exchanged in `dtype`: 16 bits halve the bytes of float32."""
    total: jax.Array = jax.lax.psum(part.astype(dtype), MODEL_AXIS)
    return total.astype(part.dtype)
