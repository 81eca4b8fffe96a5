"""A replica on Ray Serve whose engine spans two nodes, in network namespaces: one unit that is placed, used and replaced."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("ray", reason="needs `jaxserve[ray]`: make scale-check")

from tests.e2e.hosts import JOIN_TIMEOUT_S, WORKER, golden_tokens, greedy_body
from tests.e2e.http_server import ROOT, command_of, until
from tests.e2e.real_server import model
from tests.programs import shared_programs
from tests.scale.network import Host, can_make_hosts
from tests.scale.ray_cluster import API_KEY, GCS_PORT, HTTP_PORT, VARIABLES, App, Cluster, cluster, processes_on

pytestmark = [
    pytest.mark.slow,
    pytest.mark.scale,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_hosts(), reason="may not make network namespaces"),
]

NUM_TOKENS = 16
SERVER = b"jaxserve.ray.server_process"
POST = """
import sys, urllib.request
url, body, key = sys.argv[1:]
request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json", "Authorization": f"Bearer {key}"})
print(urllib.request.urlopen(request).read().decode())
"""


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    with cluster(2, cpus_per_node=2) as running:
        yield running


@pytest.fixture
def slices() -> Iterator[Cluster]:
    """Four nodes that describe themselves as the hosts of two TPU slices; they have no TPUs.

    A slice's first node has a CPU for the replica, one for its host of the engine, and perhaps a part of one for the ingress.
    """
    slices = "ray.io/tpu-slice-name"
    names, firsts = ["a", "b", "b", "a"], [True, True, False, False]
    nodes = [
        [
            f"--labels={slices}={name}",
            f"--resources={json.dumps({'TPU': 1} | ({'TPU-v5litepod-8-head': 1} if first else {}))}",
        ]
        for name, first in zip(names, firsts, strict=True)
    ]
    with cluster(4, cpus_per_node=3, own_words=nodes) as running:
        yield running


def settings() -> dict[str, Any]:
    few = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "kv_cache_memory": "8MiB", "cpu_kernels": "xla"}
    hosts = {"num_hosts": 2, "tensor_parallel_size": 2, "host_join_timeout": JOIN_TIMEOUT_S}
    ray = {"replicas": 1, "num_cpus": 1.0, "drain_timeout_s": 20.0}
    return {"model": str(model().path), "compile_cache": str(shared_programs() / "ray"), **few, **hosts, **ray}


def answer(app: App, key: str = API_KEY) -> tuple[int, list[str]]:
    """Return the status of the golden request, and the texts of its tokens if it was answered."""
    with contextlib.closing(http.client.HTTPConnection(app.host, app.port, timeout=120)) as connection:
        body = json.dumps(greedy_body(model(), NUM_TOKENS))
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection.request("POST", "/v1/completions", body, headers)
        reply = connection.getresponse()
        data = json.loads(reply.read())
        return reply.status, data["choices"][0]["logprobs"]["tokens"] if reply.status == 200 else []


def running(host: Host, word: bytes) -> list[int]:
    return [pid for pid in processes_on(host) if word in command_of(pid)]


def test_a_replica_over_two_nodes_is_placed_served_and_replaced_as_one_unit(nodes: Cluster) -> None:
    expected = golden_tokens(model(), NUM_TOKENS)
    with nodes.deployed(None, **settings()) as app:
        assert answer(app) == (200, expected)
        assert answer(app, "another") == (401, [])
        listeners = [command_of(pid) for host in nodes.hosts for pid in listening(host, HTTP_PORT)]
        assert listeners and all(b"ProxyActor" in command for command in listeners), "the port of the nodes' variables"
        (server,), (worker,) = servers(nodes), workers(nodes)
        assert [bool(running(host, SERVER)) for host in nodes.hosts] != [
            bool(running(host, WORKER)) for host in nodes.hosts
        ]
        os.kill(parent_of(server), signal.SIGKILL)  # the actor
        until(lambda: worker not in workers(nodes), "the worker outlived its replica", 180)
        until(lambda: len(workers(nodes)) == 1 and answer(app)[0] == 200, "the replica was not replaced", 400)
        assert answer(app) == (200, expected)
        assert len(servers(nodes)) == 1
    until(lambda: not workers(nodes) and not servers(nodes), "processes outlived the application", 120)


def test_each_replica_has_a_whole_tpu_slice(slices: Cluster) -> None:
    expected = golden_tokens(model(), NUM_TOKENS)
    with slices.deployed(None, **settings() | {"replicas": 2, "tpu_slice": "v5e-8"}) as app:
        assert answer(app) == (200, expected)
        until(lambda: len(workers(slices)) == 2, "the second replica did not start", 400)
        first_hosts = [bool(running(host, SERVER)) for host in slices.hosts]
        other_hosts = [bool(running(host, WORKER)) for host in slices.hosts]
        assert first_hosts == [True, True, False, False], "the nodes with the resource of a slice's first host"
        assert other_hosts == [False, False, True, True]
        assert [peers_of(host, slices) for host in slices.hosts[2:]] == [slices.hosts[1:2], slices.hosts[:1]]


@pytest.mark.parametrize("form", ["arguments", "file"])
def test_serve_run_starts_the_application(nodes: Cluster, form: str) -> None:
    """Run the documented command. The reply is asked for on the head, since Ray Serve listens on its loopback."""
    head, serve = nodes.hosts[0], str(Path(sys.executable).with_name("serve"))
    one = {key: value for key, value in settings().items() if "host" not in key}
    one |= {"tensor_parallel_size": 1, "replicas": 2, "routing": "round-robin"}
    arguments = ["jaxserve.ray:app", *(f"{key}={value}" for key, value in one.items())]
    words = [serve, "run", *(arguments if form == "arguments" else [str(settings_file(nodes.folder, one))])]
    environment = os.environ | VARIABLES | {"RAY_ADDRESS": f"{head.address}:{GCS_PORT}"}
    log = nodes.folder / "serve-run.log"
    with log.open("wb") as output:
        driver = subprocess.Popen(head.command(*words), stdout=output, stderr=output, env=environment, cwd=ROOT)
    body = json.dumps(greedy_body(model(), NUM_TOKENS))
    url = f"http://127.0.0.1:{HTTP_PORT}/v1/completions"
    ask = head.command(sys.executable, "-c", POST, url, body, API_KEY)
    try:
        until(lambda: subprocess.run(ask, capture_output=True, check=False).returncode == 0, "no answer", 400)
        reply = json.loads(subprocess.run(ask, capture_output=True, check=True).stdout)
        assert reply["choices"][0]["logprobs"]["tokens"] == golden_tokens(model(), NUM_TOKENS)
        until(lambda: len(servers(nodes)) == 2, "the second replica did not start", 400)
        check_responses_are_continued(head)
    except BaseException as error:
        error.add_note(log.read_text()[-6000:])
        raise
    finally:
        driver.send_signal(signal.SIGINT)
        driver.wait(120)
    until(lambda: not servers(nodes), "processes outlived the application", 120)


def settings_file(folder: Path, arguments: dict[str, Any]) -> Path:
    """Return a copy of the example that serves the test's model, on the port and the devices of the test."""
    content = yaml.safe_load((ROOT / "configs/ray-serve.yaml").read_text())
    content["http_options"] |= {"host": "127.0.0.1", "port": HTTP_PORT}
    content["applications"][0]["args"] |= arguments | {"max_replicas": 2, "num_gpus": 0, "max_model_len": 128}
    path = folder / "ray-serve.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def check_responses_are_continued(head: Host) -> None:
    """Continue a stored response several times: only the replica that stores it can, and requests take turns otherwise."""
    url, body = f"http://127.0.0.1:{HTTP_PORT}/v1/responses", {"input": "a", "max_output_tokens": 2}
    for _ in range(5):
        words = head.command(sys.executable, "-c", POST, url, json.dumps(body), API_KEY)
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        body["previous_response_id"] = json.loads(done.stdout)["id"]


def servers(nodes: Cluster) -> list[int]:
    return [pid for host in nodes.hosts for pid in running(host, SERVER)]


def workers(nodes: Cluster) -> list[int]:
    return [pid for host in nodes.hosts for pid in running(host, WORKER)]


def peers_of(host: Host, nodes: Cluster) -> list[Host]:
    """Return the other hosts that the worker on `host` has connections with."""
    (worker,) = running(host, WORKER)
    listing = subprocess.run(host.command("ss", "-tnpH"), capture_output=True, text=True, check=True).stdout
    peers = {
        line.split()[4].rpartition(":")[0].rpartition(":")[2].strip("]")
        for line in listing.splitlines()
        if f"pid={worker}," in line
    }
    return [each for each in nodes.hosts if each.address in peers - {host.address}]


def listening(host: Host, port: int) -> set[int]:
    """Return the processes that listen on a port of `host`."""
    listing = subprocess.run(host.command("ss", "-tlnpH"), capture_output=True, text=True, check=True).stdout
    lines = [line for line in listing.splitlines() if line.split()[3].endswith(f":{port}")]
    return {int(pid) for line in lines for pid in re.findall(r"pid=(\d+)", line)}


def parent_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("PPid:"))
