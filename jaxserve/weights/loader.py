"""Fills a model skeleton from a checkpoint: read one tensor, check, cast, place, forget.

Peak host memory is what ends up resident plus one tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.errors import CheckpointError
from jaxserve.models.skeleton import EncoderSkeleton, LeafSpec, ModelSkeleton
from jaxserve.sharding.mesh import Sharding
from jaxserve.weights.int8 import quantize_rows, row_scales

Progress = Callable[[int, int, str], None]
"""Called with (bytes done, bytes in all, tensor name)."""

_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Buffers that some checkpoints store and every implementation computes."""


_SCALE_SUFFIX = ".weight_scale"
"""Leaves that no checkpoint has: the scales of int8 weights are computed as these are quantised."""


def load_params(
    checkpoint: Checkpoint, skeleton: ModelSkeleton | EncoderSkeleton, sharding: Sharding, progress: Progress
) -> tuple[jax.Array, ...]:
    """The skeleton's leaves as device arrays, in its order.

    Raises CheckpointError for a missing, unexpected or misshaped tensor before anything is read.
    """
    check_tensors(checkpoint, skeleton)
    sizes = [leaf.dtype.itemsize * int(np.prod(leaf.shape)) for leaf in skeleton.leaves]
    done, total = 0, sum(sizes)
    leaves = []
    for leaf, size in zip(skeleton.leaves, sizes, strict=True):
        host = np.ascontiguousarray(_read(checkpoint, leaf))
        # may_alias=False: a parameter must not live in the page cache of a file that may change.
        placed = jax.device_put(host, sharding.place(leaf.axes), may_alias=False)
        leaves.append(placed.block_until_ready())
        done += size
        progress(done, total, leaf.name)
    return tuple(leaves)


def _read(checkpoint: Checkpoint, leaf: LeafSpec) -> np.ndarray:
    """The leaf's values, quantised where it is stored as int8."""
    values = checkpoint.read(_source(leaf))
    if leaf.name.endswith(_SCALE_SUFFIX):
        return row_scales(values)
    if leaf.dtype == np.int8:
        return quantize_rows(values)
    return values.astype(leaf.dtype, copy=False)


def _source(leaf: LeafSpec) -> str:
    """The checkpoint's tensor that the leaf is made of."""
    return leaf.name.removesuffix("_scale") if leaf.name.endswith(_SCALE_SUFFIX) else leaf.name


def check_tensors(checkpoint: Checkpoint, skeleton: ModelSkeleton | EncoderSkeleton) -> None:
    """Compare names and shapes of the headers with what the model needs."""
    for leaf in skeleton.leaves:
        if leaf.name.endswith(_SCALE_SUFFIX):
            continue
        info = checkpoint.tensors.get(leaf.name)
        if info is None:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {leaf.name!r} expected with shape {leaf.shape}, not found"
            )
        if info.shape != leaf.shape:
            raise CheckpointError(
                f"{info.file}: tensor {leaf.name!r}: shape {leaf.shape} expected by the model config, found {info.shape}"
            )
    _refuse_unexpected(checkpoint, skeleton)


def _refuse_unexpected(checkpoint: Checkpoint, skeleton: ModelSkeleton | EncoderSkeleton) -> None:
    """A tensor nobody uses means that config and weights disagree, and the output would be wrong."""
    known = {leaf.name for leaf in skeleton.leaves} | skeleton.config.spare_tensors
    for name, info in checkpoint.tensors.items():
        if name not in known and not name.endswith(_DERIVED_SUFFIXES):
            raise CheckpointError(f"{info.file}: tensor {name!r} is not expected by the model config")
