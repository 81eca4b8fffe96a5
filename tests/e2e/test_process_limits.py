"""Limits that a shell or numactl gives to the server: both processes obey them, and the log says if they are too low."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.documented_commands import ROOT, commands_of
from tests.e2e.http_server import await_ready, fake_server_command, launched
from tests.e2e.test_engine_restarts import text_of
from tests.unit.docker.manifests import pods

pytestmark = pytest.mark.slow

NODES = Path("/sys/devices/system/node")


def command(folder: Path) -> list[str]:
    """Return the command of a server with the fake engine, in place of `jaxserve serve MODEL --port 8000`."""
    return fake_server_command({"server": {"port": 0, "uds_dir": str(folder)}})


def test_a_limit_on_open_files_that_connections_exceed_is_named(tmp_path: Path) -> None:
    with launched(["sh", "-c", 'ulimit -n 2048 && exec "$@"', "sh", *command(tmp_path)]) as server:
        await_ready(server)
        text_of(server)
    line = "4096 connections (--max-connections) need 4352 file descriptors, this process may have 2048 (ulimit -n)"
    assert line in server.output


@pytest.mark.parametrize("words", commands_of(ROOT / "docs" / "operating.md", "numactl"), ids=" ".join)
def test_numactl_binds_the_server_and_its_engine_to_a_node(words: list[str], tmp_path: Path) -> None:
    if shutil.which("numactl") is None:
        pytest.skip("no numactl on this machine")
    begin = words[: words.index("jaxserve")]
    (node,) = {int(word.partition("=")[2]) for word in begin[1:]}
    if not (NODES / f"node{node}").exists():
        pytest.skip(f"no NUMA node {node} on this machine")
    with launched([*begin, *command(tmp_path)]) as server:
        await_ready(server)
        text_of(server)
        for pid in (server.process.pid, server.engine_pid()):
            policies = re.findall(r"^\w+ (\S+)", Path(f"/proc/{pid}/numa_maps").read_text(), re.M)
            assert f"bind:{node}" in policies and "default" not in policies
            assert os.sched_getaffinity(pid) <= cores_of(node)


@pytest.mark.parametrize("file", ["tpu", "multi-host-tpu"])
def test_a_pod_with_tpus_raises_the_limit_of_locked_memory_and_becomes_the_server(file: str, tmp_path: Path) -> None:
    """Without CAP_SYS_RESOURCE the shell says that it may not, and the server starts all the same."""
    (begin,) = {" ".join(pod.container["command"][:2]) for pod in pods() if pod.place.startswith(f"{file}-")}
    (text,) = {pod.container["command"][2] for pod in pods() if pod.place.startswith(f"{file}-")}
    (limit_kib,) = re.findall(r"^ulimit -l (\d+);", text)
    program = tmp_path / "jaxserve"
    program.write_text(f'#!/bin/sh\nshift\nexec {shlex.join(command(tmp_path))} "$@"\n')
    program.chmod(0o755)
    with launched(["env", f"PATH={tmp_path}:{os.environ['PATH']}", *begin.split(), text]) as server:
        await_ready(server)
        capabilities = re.findall(r"^CapEff:\s+(\w+)$", Path("/proc/self/status").read_text(), re.M)[0]
        if int(capabilities, 16) >> 24 & 1:
            limits = Path(f"/proc/{server.process.pid}/limits").read_text()
            assert re.findall(r"^Max locked memory +(\d+)", limits, re.M) == [str(int(limit_kib) << 10)]
        else:
            assert "ulimit: error setting limit" in server.output


def cores_of(node: int) -> set[int]:
    """Return the processors of a node."""
    parts = [part.split("-") for part in (NODES / f"node{node}" / "cpulist").read_text().strip().split(",")]
    return {core for part in parts for core in range(int(part[0]), int(part[-1]) + 1)}
