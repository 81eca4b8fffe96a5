"""Reads the available memory of this host: free or cached, within the limits of the process's control groups."""

from __future__ import annotations

import os
from pathlib import Path

from jaxserve.runner.host.cgroup import ROOT, memory_left


def available_bytes(root: Path = ROOT) -> int:
    """Return the bytes that a process can take without swapping. The page cache of files counts as free.

    root: the folder that stands for `/`.
    """
    found = _available(root / "proc/meminfo")
    if found is None:
        found = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = memory_left(root)
    return found if left is None else min(found, left)


def _available(meminfo: Path) -> int | None:
    try:
        text = meminfo.read_text(encoding="utf-8")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return None
