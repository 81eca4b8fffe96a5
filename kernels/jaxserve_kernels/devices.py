"""Properties of the device that programs of this process run on."""

from __future__ import annotations

import jax


def multiprocessors(otherwise: int) -> int:
    """Return the number of multiprocessors of this process's GPU.

    `otherwise` is returned in a process that only compiles for one: a description of a device does not have it. The
    number differs between devices of one kind: parts of a GPU (MIG) have fewer.
    """
    device = jax.devices()[0]
    return int(getattr(device, "core_count", otherwise)) if device.platform == "gpu" else otherwise
