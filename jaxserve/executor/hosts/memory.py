"""Memory in use on this host, for the numbers that hosts report."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def memory_in_use() -> int:
    """Return the bytes in use on this host's devices; on CPUs, the resident memory of this process."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("bytes_in_use" in each for each in stats):
        return sum(int(each["bytes_in_use"]) for each in stats)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
