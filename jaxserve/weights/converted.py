"""Parameters in an Orbax checkpoint: written once as devices hold them, and restored straight into the devices' shards."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from jaxserve.checkpoint.converted import ARRAYS, ConvertedCheckpoint
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.zarr_arrays import ZarrArrays
from jaxserve.errors import CheckpointError, shown
from jaxserve.models.skeleton import AnySkeleton, LeafSpec, ModelSkeleton
from jaxserve.quant.array import ArraySpec, Ranges
from jaxserve.quant.kv_scales import is_kv_scale
from jaxserve.quant.tensor import TensorInfo
from jaxserve.sharding.mesh import Sharding
from jaxserve.weights.parts import parts_by_device, slices

T = TypeVar("T")


def array_layout(skeleton: AnySkeleton) -> dict[str, str]:
    """Return everything that the arrays of the parameters depend on beside the weights, by name."""
    policy, config = skeleton.policy, skeleton.config
    leaves = [leaf for leaf in skeleton.leaves if leaf.is_converted]
    order = [getattr(config, name, None) for name in ("head_dim", "rotary_dim", "rotary_pairs", "kv_copies")]
    return {
        "dtype": str(policy.weights),
        "quantization": policy.quant.name,
        "platform": policy.quant.platform,
        "devices": f"{policy.mesh}, fused for {policy.fused_for}",
        "parameters": hashlib.sha256(repr((leaves, policy.quant, order)).encode()).hexdigest()[:16],
    }


def described_tensors(checkpoint: Checkpoint, skeleton: ModelSkeleton) -> list[TensorInfo]:
    """Return the checkpoint's tensors that the parameters are made of, and scales of a KV cache in another dtype: a server with such
    a cache must find that the conversion lacks them."""
    needed = {name for leaf in skeleton.leaves for name in leaf.parts}
    return [info for info in checkpoint.tensors.values() if info.name in needed or is_kv_scale(info.name)]


def save_arrays(folder: Path, skeleton: ModelSkeleton, params: Sequence[jax.Array]) -> None:
    """Write the parameters, in the order of the skeleton's arrays, as an Orbax checkpoint in `folder`.

    They are not compressed: weights hardly shrink, and decompressing takes several times as long as reading. Raises OSError.
    """
    from orbax.checkpoint import PyTreeCheckpointer  # here: seconds that no other command need spend

    arrays = iter(params)
    tree = {leaf.name: [next(arrays) for _ in leaf.arrays] for leaf in skeleton.leaves}
    tree = {leaf.name: tree[leaf.name] for leaf in skeleton.leaves if leaf.is_converted}
    with PyTreeCheckpointer(use_compression=False) as checkpointer:
        try:
            checkpointer.save((folder / ARRAYS).resolve(), tree)
        except ValueError as error:  # TensorStore's, for what the file system refuses
            number = errno.ENOSPC if "RESOURCE_EXHAUSTED" in str(error) else errno.EIO
            raise OSError(number, os.strerror(number)) from error


def restore_arrays(
    checkpoint: ConvertedCheckpoint,
    skeleton: AnySkeleton,
    sharding: Sharding,
    on_read: Callable[[int], None],
) -> Iterator[list[jax.Array]]:
    """Yield the arrays of each parameter that was converted, in the skeleton's order, on the devices.

    Each device reads its shards. At most one shard is read ahead of the one that is placed, so host memory holds two.
    on_read: called with the bytes of each shard. Raises CheckpointError in one line if the conversion is for other
    settings or cannot be read.
    """
    wanted, found = array_layout(skeleton), checkpoint.manifest.layout
    others = [
        f"{name} {found.get(name)}, needed: {value}" for name, value in wanted.items() if found.get(name) != value
    ]
    if others:
        raise CheckpointError(
            f"{checkpoint.path}: converted for other settings ({'; '.join(others)}); convert the model again with those of the server"
        )
    leaves = [leaf for leaf in skeleton.leaves if leaf.is_converted]
    reads = _one_ahead(_reads(ZarrArrays(checkpoint.path / ARRAYS, "zarr"), leaves, sharding))
    for leaf in leaves:
        yield [_place(spec, sharding, reads, on_read) for spec in leaf.arrays]


def _reads(
    stores: ZarrArrays, leaves: Iterable[LeafSpec], sharding: Sharding
) -> Iterator[tuple[Ranges, Callable[[], np.ndarray]]]:
    """Start to read each part that this process's devices hold, one array after the other; yield it, and a function that waits
    for it."""
    for leaf in leaves:
        for index, spec in enumerate(leaf.arrays):
            name = f"{leaf.name}.{index}"
            store = stores.open(name)
            found = (tuple(store.shape), np.dtype(store.dtype.numpy_dtype))
            if found != (spec.shape, np.dtype(spec.dtype)):
                raise CheckpointError(
                    f"{stores.folder}: array {shown(name)}: expected {spec.shape} of {spec.dtype}, found {found[0]} of {found[1]}"
                )
            parts = parts_by_device(sharding.place(spec.axes), spec.shape)
            for ranges in dict.fromkeys(parts.values()):
                yield ranges, partial(_wait, stores, name, *stores.start(store[slices(ranges)]))


def _wait(stores: ZarrArrays, name: str, array: np.ndarray, read: Any) -> np.ndarray:
    """Return an array when it is filled."""
    try:
        read.result()
        return array
    except Exception as error:
        raise stores.unreadable(name, error) from error


def _one_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield items, each after the next one was taken from the iterator."""
    waiting: list[T] = []
    for item in items:
        waiting.append(item)
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def _place(
    spec: ArraySpec,
    sharding: Sharding,
    reads: Iterator[tuple[Ranges, Callable[[], np.ndarray]]],
    on_read: Callable[[int], None],
) -> jax.Array:
    """Place the parts of one array, which are next among `reads`."""
    place = sharding.place(spec.axes)
    held, placed = parts_by_device(place, spec.shape), dict[jax.Device, jax.Array]()
    for _ in set(held.values()):
        ranges, wait = next(reads)
        part = wait()
        on_read(part.nbytes)
        for device in (device for device, own in held.items() if own == ranges):
            # may_alias: the part is memory of its own, which only a device on this host may keep.
            placed[device] = jax.device_put(part, device, may_alias=True)
    arrays = [placed[device] for device in held]
    array: jax.Array = jax.make_array_from_single_device_arrays(spec.shape, place, arrays)
    return array.block_until_ready()
