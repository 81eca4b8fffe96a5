"""Fills a model skeleton from a checkpoint: read one tensor, check, cast, place, forget.

Peak host memory is what ends up resident plus one parameter, and one tensor more where that is joined of several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.checkpoint.fp8 import FP8, ROW_SCALES
from jaxserve.checkpoint.int4 import INT4, OFFSETS
from jaxserve.checkpoint.protocol import Checkpoint, TensorInfo
from jaxserve.errors import CheckpointError
from jaxserve.models.skeleton import EncoderSkeleton, LeafSpec, ModelSkeleton
from jaxserve.sharding.mesh import Sharding
from jaxserve.weights.groups import group_scales, quantize_groups
from jaxserve.weights.reordered import with_rotary_order
from jaxserve.weights.rows import quantize_rows, row_scales
from jaxserve.weights.widen import widened

Progress = Callable[[int, int, str], None]
"""Called with (bytes done, bytes in all, tensor name)."""

_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Buffers that some checkpoints store and every implementation computes."""


_OF_MATRICES = (ROW_SCALES, OFFSETS)
"""Of leaves that few checkpoints have: scales are computed as the weights are quantised."""


def load_params(
    checkpoint: Checkpoint, skeleton: ModelSkeleton | EncoderSkeleton, sharding: Sharding, progress: Progress
) -> tuple[jax.Array, ...]:
    """The skeleton's leaves as device arrays, in its order.

    Raises CheckpointError for a missing, unexpected or misshaped tensor before anything is read.
    """
    check_tensors(checkpoint, skeleton)
    checkpoint = with_rotary_order(checkpoint, skeleton.config)
    by_name = {leaf.name: leaf for leaf in skeleton.leaves}
    done, total = 0, sum(leaf.num_bytes for leaf in skeleton.leaves)
    leaves = []
    for leaf in skeleton.leaves:
        host = leaf.join(_read(checkpoint, name, leaf, by_name) for name in leaf.tensors)
        # may_alias=False: a parameter must not live in the page cache of a file that may change.
        placed = jax.device_put(host, sharding.place(leaf.axes), may_alias=False)
        leaves.append(placed.block_until_ready())
        done += leaf.num_bytes
        progress(done, total, leaf.name)
    return tuple(leaves)


def _read(checkpoint: Checkpoint, wanted: str, leaf: LeafSpec, leaves: Mapping[str, LeafSpec]) -> np.ndarray:
    """What one tensor of the checkpoint gives to `leaf`; quantised where `leaves` has scales for it.

    wanted: the tensor, or what its scales or offsets would be called.
    """
    name, matrix = _matrix(wanted), leaves[_matrix(leaf.name)]
    scale = leaves.get(matrix.name + ROW_SCALES)
    if scale is not None and _is_kept(checkpoint.tensors, name, matrix, scale):
        return _kept(checkpoint, wanted, leaf)
    values = widened(checkpoint, name)
    if scale is None:
        return values.astype(leaf.dtype, copy=False)
    if len(scale.own_shape) == 1:
        return quantize_rows(values, leaf.dtype) if wanted == name else row_scales(values, matrix.dtype)
    scales = group_scales(values, scale.own_shape[0], scale.dtype)
    if wanted == name:
        return quantize_groups(values, scales).astype(leaf.dtype, copy=False)
    return scales if wanted.endswith(ROW_SCALES) else np.zeros(scales.shape, leaf.dtype)


def _is_kept(tensors: Mapping[str, TensorInfo], name: str, matrix: LeafSpec, scale: LeafSpec) -> bool:
    """Whether the tensor is quantised as the parameter is."""
    stored = tensors[name].stored_dtype if name + ROW_SCALES in tensors else None
    if stored == INT4:
        return len(scale.own_shape) == 2
    return stored == FP8 and matrix.dtype == jnp.float8_e4m3fn and name + ROW_SCALES in tensors


def _kept(checkpoint: Checkpoint, wanted: str, leaf: LeafSpec) -> np.ndarray:
    """As it is stored; groups may be smaller than the stored ones."""
    if wanted == _matrix(wanted):
        return checkpoint.read(wanted).astype(leaf.dtype, copy=False)
    if wanted not in checkpoint.tensors:  # what has offsets elsewhere has none here
        return np.zeros((checkpoint.tensors[_matrix(wanted)].shape[0], leaf.own_shape[0]), leaf.dtype)
    values = checkpoint.read(wanted)
    return (
        values.repeat(leaf.own_shape[0] // values.shape[1], axis=1).astype(leaf.dtype) if values.ndim == 2 else values
    )


def _matrix(name: str) -> str:
    """What a parameter is, or what its scales or offsets belong to."""
    end = next((end for end in _OF_MATRICES if name.endswith(f".weight{end}")), "")
    return name.removesuffix(end)


def check_tensors(checkpoint: Checkpoint, skeleton: ModelSkeleton | EncoderSkeleton) -> None:
    """Compare names and shapes of the headers with what the model needs."""
    parts = {name: shape for leaf in skeleton.leaves for name, shape in leaf.parts.items()}
    for name, shape in parts.items():
        if name != _matrix(name):
            continue
        info = checkpoint.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{checkpoint.path}: tensor {name!r} expected with shape {shape}, not found")
        if info.shape != shape:
            raise CheckpointError(
                f"{info.file}: tensor {name!r}: shape {shape} expected by the model config, found {info.shape}"
            )
    _refuse_unexpected(checkpoint, parts.keys() | skeleton.config.spare_tensors)


def _refuse_unexpected(checkpoint: Checkpoint, known: Set[str]) -> None:
    """A tensor nobody uses means that config and weights disagree, and the output would be wrong."""
    for name, info in checkpoint.tensors.items():
        if _matrix(name) in known or name.endswith(_DERIVED_SUFFIXES):
            continue
        if name.endswith(".bias") and not checkpoint.read(name).any():
            continue  # exporters of GPTQ write zeros where the model has none
        raise CheckpointError(f"{info.file}: tensor {name!r} is not expected by the model config")
