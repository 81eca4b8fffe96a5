"""Collectives written by hand: tensor-parallel parts of a layer (Shoeybi et al., arXiv 1909.08053) and of a batch.

XLA partitions everything else. It cannot partition kernels, and its own choices exchange more than is necessary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxserve.sharding.rules import Axes, AxisRules, MeshAxes

R = TypeVar("R")


def has_mesh() -> bool:
    """Return True if a mesh of several devices is in context."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1


def sharded(
    compute: Callable[..., R], operands: Sequence[tuple[Any, Axes]], axes: Axes | list[Axes], rules: AxisRules
) -> R:
    """Run compute(*operands) under `jax.shard_map` on the mesh in context; without one, run it directly.

    operands: arrays or pytrees, each with its (leading) logical axes. axes: logical axes of the result; a list has those of each
    array of a tuple.
    """
    values, operand_axes = zip(*operands, strict=True)
    if not has_mesh():
        return compute(*values)
    # Kernels do not declare how their results vary over the mesh: check_vma.
    specs = tuple(map(rules.spec, axes)) if isinstance(axes, list) else rules.spec(axes)
    mapped = jax.shard_map(compute, in_specs=tuple(map(rules.spec, operand_axes)), out_specs=specs, check_vma=False)
    result: R = mapped(*values)
    return result


def batch_sharded(
    compute: Callable[..., R], logits: jax.Array, by_row: Sequence[Any], whole: Sequence[Any], rules: AxisRules
) -> R:
    """Run compute(logits, *by_row, *whole) with the rows of the batch split over the devices of the mesh in context.

    logits: `[B, V]`; if columns are split, an all-to-all exchanges them for rows. by_row: arrays or pytrees whose first
    axis is B, as in the result. If B does not divide by the mesh size, every device computes all rows.
    """
    mesh, num_rows = jax.sharding.get_abstract_mesh(), len(logits)
    if not has_mesh() or num_rows % mesh.size:
        return sharded(compute, [(each, ()) for each in (logits, *by_row, *whole)], (), rules)
    columns = rules.mesh_axes("vocab")
    others = tuple(axis for axis in mesh.axis_names if axis not in columns)
    order = others + columns  # of the devices' rows

    # Everything but the logits is replicated before and after: otherwise XLA would split distant arrays by rows, too.
    def compute_shard(logits: jax.Array, by_row: Sequence[Any], whole: Sequence[Any]) -> R:
        def shard(each: jax.Array, axes: MeshAxes) -> jax.Array:
            size = len(each) // jax.lax.axis_size(axes)
            return jax.lax.dynamic_slice_in_dim(each, jax.lax.axis_index(axes) * size, size)

        if others:
            logits = shard(logits, others)
        if columns:
            logits = jax.lax.all_to_all(logits, columns, split_axis=0, concat_axis=1, tiled=True)
        parts = compute(logits, *jax.tree.map(lambda each: shard(each, order), by_row), *whole)
        gathered: R = jax.tree.map(lambda part: jax.lax.all_gather(part, order, tiled=True), parts)
        return gathered

    operands = [(logits, (None, "vocab")), (tuple(by_row), ()), (tuple(whole), ())]
    return sharded(compute_shard, operands, (), rules)


def all_reduce(part: jax.Array, dtype: jnp.dtype, axes: MeshAxes) -> jax.Array:
    """Return the sum of every device's `part`, exchanged in `dtype`: 16 bits halve the bytes of float32."""
    total: jax.Array = jax.lax.psum(part.astype(dtype), axes)
    return total.astype(part.dtype)
