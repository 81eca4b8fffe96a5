"""The available memory of a host follows the system and the limits of the process's control groups."""

from __future__ import annotations

from pathlib import Path

from jaxserve.runner.host.memory import available_bytes
from tests.unit.runner.cgroup_files import unified, write_files


def test_the_page_cache_counts_as_free(tmp_path: Path) -> None:
    text = "MemTotal: 100 kB\nMemFree: 10 kB\nMemAvailable: 60 kB\nCached: 50 kB"
    assert available_bytes(write_files(tmp_path, {"proc/meminfo": text})) == 60 * 1024


def test_a_container_limits_it(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    files = unified() | {
        "proc/meminfo": "MemAvailable: 1000 kB",
        f"{group}/memory.max": "500000",
        f"{group}/memory.current": "400000",
        f"{group}/memory.stat": "inactive_file 50000",
    }
    assert available_bytes(write_files(tmp_path, files)) == 150_000
    assert available_bytes(write_files(tmp_path, {f"{group}/memory.max": "max"})) == 1_024_000


def test_this_host_has_some() -> None:
    assert available_bytes() > 1 << 20
