"""The available memory of a host follows the system and the container's limit."""

from __future__ import annotations

from pathlib import Path

from jaxserve.runner.host_memory import available_bytes


def test_the_page_cache_counts_as_free(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemFree: 10 kB\nMemAvailable: 60 kB\nCached: 50 kB\n")
    assert available_bytes(meminfo, tmp_path / "none") == 60 * 1024


def test_a_container_limits_it(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 1000 kB\n")
    for name, text in {
        "memory.max": "500000",
        "memory.current": "400000",
        "memory.stat": "inactive_file 50000",
    }.items():
        (tmp_path / name).write_text(text + "\n")
    assert available_bytes(meminfo, tmp_path) == 150_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, tmp_path) == 1_024_000


def test_this_host_has_some() -> None:
    assert available_bytes() > 1 << 20
