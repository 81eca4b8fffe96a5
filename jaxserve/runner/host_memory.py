"""Reads the available memory of this host: free or cached, within the container's limit."""

from __future__ import annotations

import os
from pathlib import Path

_PROC_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _PROC_MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return the bytes that a process can take without swapping. The page cache of files counts as free."""
    found = _available(meminfo)
    if found is None:
        found = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = _left_in_container(cgroup)
    return found if left is None else max(0, min(found, left))


def _available(meminfo: Path) -> int | None:
    for line in _text(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return None


def _left_in_container(cgroup: Path) -> int | None:
    """Return None without a limit (cgroup v2)."""
    limit, used = _text(cgroup / "memory.max").strip(), _text(cgroup / "memory.current").strip()
    if not limit.isdigit() or not used.isdigit():
        return None
    statistics = dict(line.split() for line in _text(cgroup / "memory.stat").splitlines())
    return int(limit) - int(used) + int(statistics.get("inactive_file", 0))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
