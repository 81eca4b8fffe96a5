"""The parts of an array that devices hold."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxserve.checkpoint.memory import aligned_empty
from jaxserve.quant.array import Ranges


def parts_by_device(place: NamedSharding, shape: tuple[int, ...]) -> dict[jax.Device, Ranges]:
    """Return the part of an array that each device of this process holds."""
    found = place.addressable_devices_indices_map(shape)
    return {
        device: tuple(range(*index.indices(size)) for index, size in zip(indices or (), shape, strict=True))
        for device, indices in found.items()
    }


def slices(ranges: Ranges) -> tuple[slice, ...]:
    """Return the index that cuts a part out of the array."""
    return tuple(slice(each.start, each.stop) for each in ranges)


def copy_to(array: np.ndarray, device: jax.Device) -> jax.Array:
    """Return a copy of an array on a device.

    `jax.device_put` makes none for a CPU where the memory happens to be aligned, whatever its `may_alias` says: the copy would be
    the memory of a file that may change, or of a caller who goes on using it.
    """
    if device.platform == "cpu":
        copied = aligned_empty(array.shape, array.dtype)
        np.copyto(copied, array)
        array = copied
    placed: jax.Array = jax.device_put(array, device, may_alias=True)
    return placed


def copy_to_all(array: np.ndarray, place: NamedSharding) -> jax.Array:
    """Return a copy of an array on the devices of a sharding. Every host gives the same array, and none waits for others.

    With several hosts `jax.device_put` compares the arrays of all of them, so all hosts would have to call it in one order.
    """
    held = parts_by_device(place, array.shape)
    placed = [copy_to(array[slices(ranges)], device) for device, ranges in held.items()]
    return jax.make_array_from_single_device_arrays(array.shape, place, placed)
