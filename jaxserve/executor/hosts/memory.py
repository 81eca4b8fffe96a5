"""Memory in use on this host, for the numbers that hosts report."""

from __future__ import annotations

import jax

from jaxserve.executor.measured import resident_bytes


def memory_in_use() -> int:
    """Return the bytes in use on this host's devices; on CPUs, the resident memory of this process."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("bytes_in_use" in each for each in stats):
        return sum(int(each["bytes_in_use"]) for each in stats)
    return resident_bytes()


def device_memory() -> dict[str, int]:
    """Return the bytes in use on each device of this host, by its number; nothing for devices that do not tell."""
    stats = {str(device.id): device.memory_stats() or {} for device in jax.local_devices()}
    return {device: int(each["bytes_in_use"]) for device, each in stats.items() if "bytes_in_use" in each}
