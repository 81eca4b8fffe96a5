"""A node of Ray whose `ray start --block` gets SIGTERM, as in a pod that ends, lets the requests on it end."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

pytest.importorskip("ray", reason="needs `jaxserve[ray]`: make scale-check")

from tests.e2e.http_server import ROOT
from tests.scale.network import can_make_hosts
from tests.scale.ray_cluster import GCS_PORT, VARIABLES, cluster, processes_on
from tests.scale.test_ray_serve import FAKE, SMALL, complete, read_until, servers, streams_on_all_replicas

pytestmark = [
    pytest.mark.slow,
    pytest.mark.scale,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_hosts(), reason="may not make network namespaces"),
]


def test_a_node_that_gets_sigterm_ends_after_its_requests() -> None:
    """Ray drains such a node for the time in the variable, which is 30 s by default and too short for these requests."""
    fields = {"prompt": [5, 6], "temperature": 0}
    fake = FAKE | {"device_seconds": 0.05, "num_blocks": 4000}
    ray = SMALL | {"drain_timeout_s": 120.0, "routing": "round-robin", "num_cpus": 0.7}  # all fit the head
    variables = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "130"}
    with cluster(2, cpus_per_node=3, variables=lambda host: variables) as nodes, nodes.deployed(fake, **ray) as app:
        streams, heads = streams_on_all_replicas(app, fields | {"max_tokens": 800})
        assert set(servers(nodes)) & set(processes_on(nodes.hosts[1]))
        started = time.monotonic()
        nodes.nodes[1].terminate()
        rests = [head + read_until(stream, b"data: [DONE]\n\n") for head, stream in zip(heads, streams, strict=True)]
        assert time.monotonic() - started > 31, "longer than Ray's default"
        for stream, rest in zip(streams, rests, strict=True):
            stream.close()
            assert (rest.count(b'"finish_reason":"length"'), rest.count(b'data: {"error":')) == (1, 0)
        nodes.nodes[1].wait(180)
        complete(app, fields | {"max_tokens": 4})
        words = [sys.executable, "-m", "jaxserve.ray.await_workers", "600"]
        environment = os.environ | VARIABLES | {"RAY_ADDRESS": f"{nodes.hosts[0].address}:{GCS_PORT}"}
        subprocess.run(nodes.hosts[0].command(*words), env=environment, cwd=ROOT, check=True, timeout=180)
