"""The parts of an array that devices hold."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding

Ranges = tuple[range, ...]
"""A part of an array: a range of each dimension."""


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
