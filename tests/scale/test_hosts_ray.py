"""Hosts that Ray places: a cluster of two nodes, the server on one of them and a worker on the other."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.hosts import FEW_PROGRAMS, JOIN_TIMEOUT_S, START_TIMEOUT_S, golden_tokens, greedy_tokens
from tests.e2e.http_server import await_ready, children_of, command_of, launched, until
from tests.e2e.real_server import model
from tests.programs import shared_programs
from tests.scale.ray_cluster import VARIABLES

pytest.importorskip("ray", reason="needs `pip install 'jaxserve[ray]'`")
pytestmark = [pytest.mark.slow, pytest.mark.scale, pytest.mark.filterwarnings("default")]

NUM_TOKENS = 16


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster with two nodes of two CPUs each."""
    from ray.cluster_utils import Cluster

    for name, value in VARIABLES.items():  # actors inherit them from their nodes
        monkeypatch.setenv(name, value)
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    nodes.add_node(num_cpus=2)
    nodes.wait_for_nodes()
    yield str(nodes.address)
    nodes.shutdown()


def test_ray_starts_the_other_host_and_ends_it_with_the_server(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    command = [sys.executable, "-m", "jaxserve.cli.main", "serve", str(model().path), *FEW_PROGRAMS]
    command += ["--cpu-kernels", "xla", "--kv-cache-memory", "8MiB", "--port", "0", "--uds-dir", str(tmp_path)]
    command += ["--num-hosts", "2", "--tensor-parallel-size", "2", "--placement", "ray", "--served-model-name", "tiny"]
    command += ["--host-join-timeout", JOIN_TIMEOUT_S, "--compile-cache", str(shared_programs() / "ray")]
    with launched(command) as server:
        await_ready(server, START_TIMEOUT_S)
        assert greedy_tokens(server, model(), NUM_TOKENS) == golden_tokens(model(), NUM_TOKENS)
        assert server.metric('host_up{engine="0",host="1",model_name="tiny"}') == 1
        assert not any(b"host_worker" in command_of(pid) for pid in children_of(server.process.pid)), "Ray's, not ours"
        assert server.stop() == 0
        until(lambda: not workers(), "a worker outlived its server")


def workers() -> list[int]:
    """Return the worker processes of the test's checkpoint."""
    found = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in found if b"jaxserve.engine.host_worker" in command_of(pid)]
