"""Tests of the limits of control groups, on the files of simulated hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.runner.host.cgroup import cpu_quota, memory_left, oom_kills
from jaxserve.runner.host.cores import num_cores, num_threads
from tests.unit.runner.cgroup_files import separate, unified, write_files

GROUP = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/cpu,cpuacct"
NO_LIMIT_V1 = str((1 << 63) - 4096)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        (unified(), None),
        (unified() | {f"{GROUP}/cpu.max": "max 100000"}, None),
        (unified() | {f"{GROUP}/cpu.max": "250000 100000"}, 2.5),
        (separate(), None),
        (separate() | {f"{V1}/cpu.cfs_quota_us": "-1", f"{V1}/cpu.cfs_period_us": "100000"}, None),
        (separate() | {f"{V1}/cpu.cfs_quota_us": "150000", f"{V1}/cpu.cfs_period_us": "50000"}, 3.0),
        ({"proc/self/cgroup": "0::/", "proc/self/mountinfo": "25 1 0:22 / / rw - ext4 /dev/vda rw"}, None),
    ],
)
def test_quota_of_processor_time(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(write_files(tmp_path, files)) == quota


def test_least_quota_of_all_levels_counts(tmp_path: Path) -> None:
    """systemd: CPUQuota=400% for a service, 200% for its slice, nothing for the user's slice."""
    files = unified("/user.slice/llm.slice/jaxserve.service") | {
        f"{GROUP}/user.slice/cpu.max": "max 100000",
        f"{GROUP}/user.slice/llm.slice/cpu.max": "200000 100000",
        f"{GROUP}/user.slice/llm.slice/jaxserve.service/cpu.max": "400000 100000",
        f"{GROUP}/other.slice/cpu.max": "50000 100000",
    }
    assert cpu_quota(write_files(tmp_path, files)) == 2.0


@pytest.mark.parametrize("mounted", ["/docker/7f3a", "/docker/another"])
def test_container_without_a_namespace_sees_its_own_group_at_the_mount(tmp_path: Path, mounted: str) -> None:
    files = separate("/docker/7f3a", mounted) | {
        f"{V1}/cpu.cfs_quota_us": "100000",
        f"{V1}/cpu.cfs_period_us": "100000",
    }
    assert cpu_quota(write_files(tmp_path, files)) == 1.0


def test_memory_limits_of_cgroup_v2(tmp_path: Path) -> None:
    """systemd: MemoryMax for the service, MemoryHigh for its slice."""
    service = f"{GROUP}/llm.slice/jaxserve.service"
    root = write_files(
        tmp_path,
        unified("/llm.slice/jaxserve.service")
        | {
            f"{service}/memory.max": "900000",
            f"{service}/memory.high": "max",
            f"{service}/memory.current": "400000",
            f"{service}/memory.stat": "anon 1\ninactive_file 50000",
        },
    )
    assert memory_left(root) == 550_000
    write_files(root, {f"{GROUP}/llm.slice/memory.high": "600000", f"{GROUP}/llm.slice/memory.current": "500000"})
    assert memory_left(root) == 100_000
    write_files(root, {f"{GROUP}/llm.slice/memory.current": "700000"})
    assert memory_left(root) == 0


def test_memory_limits_of_cgroup_v1(tmp_path: Path) -> None:
    folder = f"{GROUP}/memory/docker/7f3a"
    root = write_files(
        tmp_path,
        separate("/docker/7f3a")
        | {
            f"{GROUP}/memory/memory.limit_in_bytes": NO_LIMIT_V1,
            f"{GROUP}/memory/memory.usage_in_bytes": "8000000",
            f"{folder}/memory.limit_in_bytes": "1000000",
            f"{folder}/memory.usage_in_bytes": "700000",
            f"{folder}/memory.stat": "inactive_file 1\ntotal_inactive_file 100000",
        },
    )
    assert memory_left(root) == 400_000
    write_files(root, {f"{folder}/memory.limit_in_bytes": NO_LIMIT_V1})
    assert memory_left(root) is None


def test_processes_that_the_kernel_killed_for_lack_of_memory_are_counted(tmp_path: Path) -> None:
    assert oom_kills(write_files(tmp_path / "none", unified())) == 0
    v2 = unified() | {f"{GROUP}/memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 0"}
    assert oom_kills(write_files(tmp_path / "v2", v2)) == 2
    v1 = separate("/docker/7f3a") | {
        f"{GROUP}/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3",
        f"{GROUP}/memory/docker/7f3a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1",
    }
    assert oom_kills(write_files(tmp_path / "v1", v1)) == 1


@pytest.mark.parametrize(("quota", "cores"), [("max", 8), ("50000", 1), ("299999", 2), ("300000", 3), ("1600000", 8)])
def test_cores_are_whole_ones_that_the_quota_pays_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert num_cores(write_files(tmp_path, unified() | {f"{GROUP}/cpu.max": f"{quota} 100000"})) == cores


def test_threads_of_the_users_environment_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "3")
    assert num_threads() == 3
    monkeypatch.delenv("NPROC")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4})
    assert num_threads() == num_cores() == 1


ENGINE = """
import sys
from pathlib import Path
from jaxserve.runner.host import cores as host_cores
host_cores.num_cores.__defaults__ = (Path(sys.argv[1]),)
import os
os.sched_getaffinity = lambda pid: set(range(16))
import jax, jax.numpy as jnp
from jaxserve.executor.device import first_device
from jaxserve.runner.program_key import host_key_parts
first_device(1)
(jnp.ones((256, 256)) @ jnp.ones((256, 256))).block_until_ready()
names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
print(names.count("tf_XLAEigen"), host_key_parts()["cores"])
"""


@pytest.mark.slow
def test_engine_computes_with_the_threads_of_its_quota(tmp_path: Path) -> None:
    root = write_files(tmp_path, unified() | {f"{GROUP}/cpu.max": "340000 100000"})
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"}
    command = [sys.executable, "-c", ENGINE, str(root)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.split() == ["3", "3"]
