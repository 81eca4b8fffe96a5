"""Loads a model skeleton's parameters from a checkpoint: read a tensor, quantise or cast it, place it, release it.

Peak host memory is the parameters on CPU devices plus one parameter, and one more tensor if that is made of several.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial
from typing import Final

import jax
import numpy as np

from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.errors import CheckpointError
from jaxserve.layers.rope import row_order
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.skeleton import EncoderSkeleton, ModelSkeleton
from jaxserve.quant.tensor import Tensor
from jaxserve.sharding.mesh import Sharding

Progress = Callable[[int, int, str], None]
"""Called with (bytes loaded, bytes in total, parameter name)."""

_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Buffers that some checkpoints store and every implementation computes."""
_ROTATED: Final = ("q_proj", "k_proj", "q_norm", "k_norm")
_ADDED: Final = ".lora_B"
"""Adapters of queries and keys: their up matrices have rows in the same order."""


def load_params(
    checkpoint: Checkpoint, skeleton: ModelSkeleton | EncoderSkeleton, sharding: Sharding, progress: Progress
) -> tuple[jax.Array, ...]:
    """Return the skeleton's arrays on the devices, in its order.

    Raises CheckpointError for a missing, unexpected or misshaped tensor before anything is read.
    """
    check_tensors(checkpoint, skeleton)
    checkpoint = with_rotary_order(checkpoint, skeleton.config)
    done, total = 0, sum(leaf.num_bytes for leaf in skeleton.leaves)
    params = []
    for leaf in skeleton.leaves:
        for array, spec in zip(leaf.assemble(map(checkpoint.read, leaf.tensors)), leaf.arrays, strict=True):
            # may_alias=False: a parameter must not live in the page cache of a file that may change.
            placed = jax.device_put(array, sharding.place(spec.axes), may_alias=False)
            params.append(placed.block_until_ready())
        done += leaf.num_bytes
        progress(done, total, leaf.name)
    return tuple(params)


def check_tensors(checkpoint: Checkpoint, skeleton: ModelSkeleton | EncoderSkeleton) -> None:
    """Raise CheckpointError unless the headers have the tensors that the model needs, and no others."""
    parts = {name: shape for leaf in skeleton.leaves for name, shape in leaf.parts.items()}
    for name, shape in parts.items():
        info = checkpoint.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{checkpoint.path}: tensor {name!r} expected with shape {shape}, not found")
        if info.shape != shape:
            raise CheckpointError(
                f"{info.file}: tensor {name!r}: shape {shape} expected by the model config, found {info.shape}"
            )
    _reject_unexpected(checkpoint, parts.keys() | skeleton.config.spare_tensors)


def _reject_unexpected(checkpoint: Checkpoint, known: Set[str]) -> None:
    """Raise CheckpointError for an unused tensor: config and weights disagree, and outputs would be wrong."""
    for name, info in checkpoint.tensors.items():
        if name in known or name.endswith(_DERIVED_SUFFIXES):
            continue
        if name.endswith(".bias") and not np.any(np.asarray(checkpoint.read(name))):
            continue  # exporters of GPTQ write zeros where the model has none
        raise CheckpointError(f"{info.file}: tensor {name!r} is not expected by the model config")


def with_rotary_order(checkpoint: Checkpoint, config: DecoderConfig | EncoderConfig) -> Checkpoint:
    """Return the checkpoint with the rows of query and key heads as kernels rotate them (see `row_order`).

    Weights, scales, biases and norms are reordered.
    """
    order = row_order(config) if isinstance(config, DecoderConfig) else None
    if order is None:
        return checkpoint
    rotated = (n for n in checkpoint.tensors if n.rpartition(".")[0].removesuffix(_ADDED).endswith(_ROTATED))
    readers = {name: partial(_read_reordered, name, order) for name in rotated}
    return CheckpointView(checkpoint, checkpoint.tensors, readers)


def _read_reordered(name: str, order: np.ndarray, inner: Checkpoint) -> Tensor:
    starts = np.arange(0, inner.tensors[name].shape[0], len(order))
    return inner.read(name)[(starts[:, None] + order).ravel()]
