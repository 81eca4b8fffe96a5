"""Folders that look like a host's `/proc` and `/sys/fs/cgroup`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_files(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


def unified(path: str = "/", mounted: str = "/") -> dict[str, str]:
    """Return a host with cgroup v2. path: of the process's group; mounted: the group that the mount shows."""
    return {
        "proc/self/cgroup": f"0::{path}",
        "proc/self/mountinfo": f"25 1 0:22 {mounted} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate",
    }


def separate(path: str = "/", mounted: str = "/") -> dict[str, str]:
    """Return a host with cgroup v1, where each controller has a hierarchy of its own, and an empty v2 beside them."""
    mounts = (("cpu,cpuacct", "cgroup"), ("memory", "cgroup"), ("unified", "cgroup2"))
    return {
        "proc/self/cgroup": f"4:memory:{path}\n2:cpu,cpuacct:{path}\n1:name=systemd:/\n0::/",
        "proc/self/mountinfo": "\n".join(
            f"{number} 1 0:{number} {mounted if kind == 'cgroup' else '/'} /sys/fs/cgroup/{name} rw - {kind} {kind} rw,{name}"
            for number, (name, kind) in enumerate(mounts, start=30)
        ),
    }
