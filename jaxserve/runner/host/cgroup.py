"""Limits of this process's control groups: processor time and memory, cgroup v1 and v2.

A limit may stand at any level between the process's own group and the root: Docker and Kubernetes set the group's own,
systemd also those of the slices around it (CPUQuota, MemoryMax, MemoryHigh). Every level counts, so the least is taken.

Sources: the files' formats are in the kernel's Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst; proc(5) describes
/proc/PID/cgroup and /proc/PID/mountinfo.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

ROOT: Final = Path("/")
_NO_LIMIT: Final = 1 << 60
"""A limit in bytes from here on means none: cgroup v1 has no word for it, but the largest number of pages."""


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the processors' time that this process may use per time, in processors; None without a limit.

    root: the folder that stands for `/`.
    """
    quotas = [_quota(folder) for folder in _folders(root, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Return the bytes that this process may still take; None without a limit. The page cache of files counts as free.

    root: the folder that stands for `/`.
    """
    left = [_left(folder) for folder in _folders(root, "memory")]
    return min((max(0, num_bytes) for num_bytes in left if num_bytes is not None), default=None)


def oom_kills(root: Path = ROOT) -> int:
    """Return the number of processes of this process's own group that the kernel has killed for lack of memory.

    root: the folder that stands for `/`.
    """
    texts = [
        _text(folder / name) for folder in _folders(root, "memory") for name in ("memory.events", "memory.oom_control")
    ]
    counts = [line.split()[1] for text in texts for line in text.splitlines() if line.startswith("oom_kill ")]
    return int(counts[-1]) if counts else 0  # folders of groups within others come after those


def _quota(folder: Path) -> float | None:
    quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = _text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip()
    if not (quota.isdigit() and period.isdigit() and int(period)):  # "max" in v2, -1 in v1
        return None
    return int(quota) / int(period)


def _left(folder: Path) -> int | None:
    v2 = [_number(folder / name) for name in ("memory.max", "memory.high")]
    limits = [limit for limit in (*v2, _number(folder / "memory.limit_in_bytes")) if limit is not None]
    used = _number(folder / "memory.current")
    if used is None:
        used = _number(folder / "memory.usage_in_bytes")
    if not limits or used is None or min(limits) >= _NO_LIMIT:
        return None
    statistics = dict(line.split(maxsplit=1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    cached = statistics.get("total_inactive_file") or statistics.get("inactive_file") or "0"  # v1: with its children's
    return min(limits) - used + int(cached)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's group and of those around it, in every hierarchy that has `controller`."""
    groups = _groups(root)
    for mounted, place, kind, options in _mounts(root):
        path = groups.get("" if kind == "cgroup2" else controller)
        if path is None or not (kind == "cgroup2" or controller in options):
            continue
        # The mount shows a part of the hierarchy; in a container the path may be outside of it: then it is the mount.
        inside = path.relative_to(mounted) if path.is_relative_to(mounted) else PurePosixPath()
        folder = root / place.relative_to("/")
        yield folder
        for part in inside.parts:
            folder /= part
            yield folder


def _groups(root: Path) -> dict[str, PurePosixPath]:
    """Return the path of this process's group by controller; that of cgroup v2 under the empty name."""
    groups = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), PurePosixPath(path)))
    return groups


def _mounts(root: Path) -> Iterator[tuple[PurePosixPath, PurePosixPath, str, list[str]]]:
    """Yield (group that is mounted, folder, `cgroup` or `cgroup2`, options) of the mounted hierarchies."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        place, _, source = line.partition(" - ")
        fields, kind = place.split(), source.split()
        if len(fields) > 4 and len(kind) > 2 and kind[0] in ("cgroup", "cgroup2"):
            yield PurePosixPath(fields[3]), PurePosixPath(fields[4]), kind[0], kind[2].split(",")


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
