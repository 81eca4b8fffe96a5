"""Loads a model skeleton's parameters from a checkpoint: read a tensor, quantise or cast it, place it, release it.

Several parameters are loaded at a time, those in work having no more numbers than the largest one. So peak host memory is the
parameters on CPU devices plus one parameter, and one more tensor if that is made of several.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Final

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxserve.checkpoint.converted import ConvertedCheckpoint, converted_of
from jaxserve.checkpoint.maxtext.checkpoint import ReadingOrder
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.renamed import HEAD
from jaxserve.checkpoint.vision_names import VISION
from jaxserve.errors import CheckpointError
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.skeleton import AnySkeleton, LeafSpec, ModelSkeleton
from jaxserve.quant.array import ArraySpec, Ranges
from jaxserve.quant.kv_scales import is_kv_scale
from jaxserve.sharding.mesh import Sharding
from jaxserve.weights.converted import restore_arrays
from jaxserve.weights.in_parallel import in_parallel
from jaxserve.weights.parts import copy_to, copy_to_all, parts_by_device, slices
from jaxserve.weights.reader import TensorReader, kv_copies

Progress = Callable[[int, int, str], None]
"""Called with (bytes loaded, bytes in total, parameter name)."""

MAX_THREADS: Final = 8
"""Parameters in work at a time, at most; also at most one for each processor."""
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Buffers that some checkpoints store and every implementation computes."""
_INTEGERS = frozenset({"BOOL", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"})
"""Types of numbers in safetensors files that no weight has by itself."""


def load_params(
    checkpoint: Checkpoint,
    skeleton: AnySkeleton,
    sharding: Sharding,
    progress: Progress,
    on_read: Callable[[int], None] = lambda num_bytes: None,
) -> tuple[jax.Array, ...]:
    """Return the skeleton's arrays on the devices, in its order. Scales that are to be measured are 1.

    Only what this process's devices hold is read, where the format stores outputs one by one (`Format.is_by_row`) and
    the checkpoint stores tensors plainly, or where both have the same blocks or groups (`Format.cutting`). on_read: called with the stored bytes of each part that is read.

    Raises CheckpointError for a missing, unexpected or misshaped tensor before anything is read.
    """
    check_tensors(checkpoint, skeleton)
    reader = TensorReader(checkpoint, skeleton.config, on_read)
    done, total = 0, sum(leaf.num_bytes for leaf in skeleton.leaves)
    converted, others = converted_of(checkpoint), [leaf for leaf in skeleton.leaves if not leaf.is_converted]
    params = dict[str, list[jax.Array]]()
    for leaf, arrays in itertools.chain(
        () if converted is None else _restored(converted, skeleton, sharding, on_read),
        _loaded(checkpoint, skeleton.leaves if converted is None else others, reader, sharding),
    ):
        params[leaf.name] = arrays
        done += leaf.num_bytes
        progress(done, total, leaf.name)
    return tuple(array for leaf in skeleton.leaves for array in params[leaf.name])


def _restored(
    converted: ConvertedCheckpoint, skeleton: AnySkeleton, sharding: Sharding, on_read: Callable[[int], None]
) -> Iterator[tuple[LeafSpec, list[jax.Array]]]:
    """Yield the arrays of every parameter that a conversion has."""
    leaves = (leaf for leaf in skeleton.leaves if leaf.is_converted)
    return zip(leaves, restore_arrays(converted, skeleton, sharding, on_read), strict=True)


def _loaded(
    checkpoint: Checkpoint, leaves: Sequence[LeafSpec], reader: TensorReader, sharding: Sharding
) -> Iterator[tuple[LeafSpec, list[jax.Array]]]:
    """Yield parameters with their arrays, in the order in which they are done."""
    order = ReadingOrder(checkpoint)
    most = max((_num_elements(leaf) for leaf in leaves), default=0)
    num_processors = min(len(os.sched_getaffinity(0)), MAX_THREADS)

    def position(leaf: LeafSpec) -> str:
        return order.position(next(iter(leaf.parts)))

    def load(leaf: LeafSpec) -> list[jax.Array]:
        return _load_leaf(leaf, reader, [sharding.place(spec.axes) for spec in leaf.arrays])

    for shared, together in itertools.groupby(sorted(leaves, key=position), position):
        num_threads = 1 if shared else num_processors  # an array that is kept for others is read once
        yield from in_parallel(load, together, _num_elements, most, num_threads)
        order.release()


def _num_elements(leaf: LeafSpec) -> int:
    return math.prod(leaf.shape)


def load_adapters(checkpoint: Checkpoint, skeleton: ModelSkeleton, sharding: Sharding) -> dict[int, jax.Array]:
    """Return the skeleton's arrays that hold adapters, on the devices, by their index among all of its arrays.

    Raises CheckpointError for a missing or misshaped tensor before anything is read.
    """
    check_tensors(checkpoint, skeleton)
    return _load_some(checkpoint, skeleton, sharding, [leaf for leaf in skeleton.leaves if leaf.is_adapter])


def load_changed(checkpoint: Checkpoint, skeleton: AnySkeleton, sharding: Sharding) -> dict[int, jax.Array]:
    """Return the arrays whose tensors are in `checkpoint`, and those that are measured, on the devices, by their index among all
    of the skeleton's.

    Raises CheckpointError before anything is read for a tensor that is unexpected or misshaped, and for one that is
    missing, because it is in the same array as another that is there.
    """
    given = checkpoint.tensors.keys()
    changed = [leaf for leaf in skeleton.leaves if not leaf.is_measured and not given.isdisjoint(leaf.parts)]
    for leaf in changed:
        if absent := leaf.parts.keys() - given:
            there = min(given & leaf.parts.keys())
            raise CheckpointError(
                f"{checkpoint.path}: tensor {min(absent)!r} expected, since {there!r} is there: both are served as one array"
            )
    check_tensors(checkpoint, skeleton, changed)
    if not changed:
        raise CheckpointError(f"{checkpoint.path}: expected tensors of the model, found none")
    measured = [leaf for leaf in skeleton.leaves if leaf.is_measured]
    return _load_some(checkpoint, skeleton, sharding, [*changed, *measured])


def _load_some(
    checkpoint: Checkpoint, skeleton: AnySkeleton, sharding: Sharding, leaves: Sequence[LeafSpec]
) -> dict[int, jax.Array]:
    """Return the arrays of some leaves by their index among all of the skeleton's."""
    reader = TensorReader(checkpoint, skeleton.config)
    loaded = {leaf.name: arrays for leaf, arrays in _loaded(checkpoint, leaves, reader, sharding)}
    found, index = dict[int, jax.Array](), 0
    for leaf in skeleton.leaves:
        found |= enumerate(loaded.get(leaf.name, ()), index)
        index += len(leaf.arrays)
    return found


def _load_leaf(leaf: LeafSpec, reader: TensorReader, places: Sequence[NamedSharding]) -> list[jax.Array]:
    """Place the arrays of a parameter: each device's part is assembled for it, or cut from the whole. What is measured is 1."""
    if leaf.is_measured:
        return [
            copy_to_all(np.ones(spec.shape, spec.dtype), place) for spec, place in zip(leaf.arrays, places, strict=True)
        ]
    held = [parts_by_device(place, spec.shape) for place, spec in zip(places, leaf.arrays, strict=True)]
    shards: list[list[jax.Array]] = [[] for _ in leaf.arrays]
    made: dict[Ranges, tuple[np.ndarray, ...]] = {}
    whole: tuple[np.ndarray, ...] | None = None
    for device, ranges in held[0].items():
        arrays = made.get(ranges) or reader.part(leaf, [parts[device] for parts in held])
        if arrays is None:
            whole = whole or leaf.assemble(reader.read(name, rows) for name, rows in leaf.sources)
            arrays = tuple(array[slices(parts[device])] for array, parts in zip(whole, held, strict=True))
        made[ranges] = arrays
        for placed, array in zip(shards, arrays, strict=True):
            placed.append(copy_to(array, device))
    return [
        jax.make_array_from_single_device_arrays(spec.shape, place, placed).block_until_ready()
        for spec, place, placed in zip(leaf.arrays, places, shards, strict=True)
    ]


def check_tensors(checkpoint: Checkpoint, skeleton: AnySkeleton, leaves: Iterable[LeafSpec] | None = None) -> None:
    """Raise CheckpointError unless the headers have the tensors that the model needs, floats for its weights, and no others.

    leaves: the only ones that are needed; None: all.
    """
    needed = [leaf for leaf in (skeleton.leaves if leaves is None else leaves) if not leaf.is_measured]
    parts = {name: shape for leaf in needed for name, shape in leaf.parts.items()}
    integers = {name for leaf in needed if _has_integers(leaf) for name in leaf.parts}
    for name, (rows, *rest) in parts.items():
        info, shape = checkpoint.tensors.get(name), (rows // kv_copies(name, skeleton.config), *rest)
        if info is None:
            hint = "; a model without an output head is served with --task embed" if name == HEAD else ""
            raise CheckpointError(f"{checkpoint.path}: tensor {name!r} expected with shape {shape}, not found{hint}")
        if info.shape != shape and not (is_kv_scale(name) and info.shape == (1,)):
            raise CheckpointError(
                f"{info.file}: tensor {name!r}: shape {shape} expected by the model config, found {info.shape}"
            )
        if info.stored_dtype in _INTEGERS and not info.is_quantized and name not in integers:
            raise CheckpointError(
                f"{info.file}: tensor {name!r}: float32, float16 or bfloat16 expected, found {info.stored_dtype}"
            )
    config = skeleton.config
    vision = config.vision if isinstance(config, DecoderConfig) else None
    unused = (VISION,) if vision is None else tuple(VISION + start for start in vision.unused_tensors)
    _reject_unexpected(checkpoint, parts.keys() | config.spare_tensors, unused)


def _has_integers(leaf: LeafSpec) -> bool:
    """Return True for a parameter that is no weight, such as a map of tokens."""
    return isinstance(leaf.declared, ArraySpec) and np.issubdtype(leaf.declared.dtype, np.integer)


def _reject_unexpected(checkpoint: Checkpoint, known: Set[str], unused: tuple[str, ...]) -> None:
    """Raise CheckpointError for an unused tensor: config and weights disagree, and outputs would be wrong.

    unused: starts of the names of tensors that are left out, such as those of a tower if the model is served for texts.
    """
    for name, info in checkpoint.tensors.items():
        if name in known or name.endswith(_DERIVED_SUFFIXES) or name.startswith(unused):
            continue
        if is_kv_scale(name):
            continue  # for a KV cache in another dtype
        if name.endswith(".bias") and not np.any(np.asarray(checkpoint.read(name))):
            continue  # exporters of GPTQ write zeros where the model has none
        raise CheckpointError(f"{info.file}: tensor {name!r} is not expected by the model config")
