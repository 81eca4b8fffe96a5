"""Ray Serve on two nodes in network namespaces, with four replicas that have fake engines."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs `jaxserve[ray]`: make scale-check")

from tests.e2e.http_server import command_of, until
from tests.scale.network import can_make_hosts
from tests.scale.ray_cluster import AGENT_PORTS, API_KEY, App, Cluster, cluster, drain_node, processes_on

pytestmark = [
    pytest.mark.slow,
    pytest.mark.scale,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_hosts(), reason="may not make network namespaces"),
]

NUM_REPLICAS, NUM_GROUPS, NUM_TURNS, PREFIX_TOKENS = 4, 8, 6, 320
METRICS_PORT = AGENT_PORTS["metrics-export-port"]
ROUTER_TIMES = "ray_serve_request_router_fulfillment_time_ms_bucket"
FAKE: dict[str, Any] = {
    "vocab_size": 384,
    "eos_token_ids": [],
    "device_seconds": 0.005,
    "num_blocks": 2 * (PREFIX_TOKENS // 16 + 4) + 20,
}
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
SMALL: dict[str, Any] = {"replicas": NUM_REPLICAS, "num_cpus": 1.0, "drain_timeout_s": 20.0}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    with cluster(2, cpus_per_node=3) as running:
        yield running


def complete(app: App, body: dict[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection(app.host, app.port, timeout=120)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), HEADERS)
        reply = connection.getresponse()
        data = reply.read()
        assert reply.status == 200, (reply.status, data)
        return dict(json.loads(data), replica=reply.getheader("X-Jaxserve-Replica"))


def prefix_hits(app: App) -> tuple[int, set[str]]:
    """Return the cached prompt tokens of conversations that share prefixes, and the replicas that answered."""
    num_cached, replicas = 0, set()
    for index, (turn, group) in enumerate((turn, group) for turn in range(NUM_TURNS) for group in range(NUM_GROUPS)):
        if index % 3 == 2:  # round robin must not meet the groups' period
            complete(app, {"prompt": [1], "max_tokens": 1})
        body = {"prompt": [10 + group] * PREFIX_TOKENS + [100 + turn] * 20, "max_tokens": 2, "temperature": 0}
        reply = complete(app, body)
        num_cached += reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        replicas.add(reply["replica"])
    return num_cached, replicas


def router_times(nodes: Cluster) -> dict[float, float]:
    """Return how many requests Ray counted that waited for their replica at most so many milliseconds."""
    counts: dict[float, float] = {}
    for host in nodes.hosts:
        with urllib.request.urlopen(f"http://{host.address}:{METRICS_PORT}/metrics", timeout=60) as reply:
            lines = reply.read().decode().splitlines()
        for line in lines:
            if line.startswith(ROUTER_TIMES) and 'deployment="engine"' in line:
                bound = float(line.partition('le="')[2].partition('"')[0])
                counts[bound] = counts.get(bound, 0.0) + float(line.rpartition(" ")[2])
    return counts


def open_stream(app: App, fields: dict[str, Any]) -> socket.socket:
    body = json.dumps(fields | {"stream": True}).encode()
    headers = {"Host": "x", "Content-Length": str(len(body)), **HEADERS}
    lines = ["POST /v1/completions HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    connection = socket.create_connection((app.host, app.port), timeout=120)
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
    return connection


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        received = connection.recv(65536)
        assert received, data
        data += received
    return data


def servers(nodes: Cluster) -> list[int]:
    """Return the server process of every replica on both nodes."""
    pids = [pid for host in nodes.hosts for pid in processes_on(host)]
    return [pid for pid in pids if b"tests.e2e.fake_engine_server" in command_of(pid)]


def test_exact_prefixes_hit_at_least_twice_as_often_as_round_robin(nodes: Cluster) -> None:
    # Streams of 1,000 tokens run for 20 s: some still do when all are open, and a replica is killed.
    with nodes.deployed(FAKE | {"device_seconds": 0.02}, routing="prefix", **SMALL) as app:
        assert [len([p for p in processes_on(host) if p in servers(nodes)]) > 0 for host in nodes.hosts] == [True, True]
        by_pages, replicas = prefix_hits(app)
        assert len(replicas) > 1, "conversations without a common prefix share the replicas"
        until(
            lambda: max(router_times(nodes).values(), default=0) >= NUM_GROUPS * NUM_TURNS,
            "Ray counts no routed request",
            180,
        )
        print(f"requests by milliseconds until they had a replica: {router_times(nodes)}")
        for ends_first in ("actor", "server"):
            check_killed_replica(nodes, app, ends_first)
    with nodes.deployed(FAKE, routing="round-robin", **SMALL) as app:
        by_turns, _ = prefix_hits(app)
    print(f"cached prompt tokens: {by_pages} by pages, {by_turns} by turns")
    assert by_pages >= 2 * by_turns


def replica_of(head: bytes) -> bytes:
    """Return the line of a reply's head that names the replica."""
    (line,) = (line for line in head.split(b"\r\n") if line.lower().startswith(b"x-jaxserve-replica"))
    return line


def streams_on_all_replicas(app: App, fields: dict[str, Any]) -> tuple[list[socket.socket], list[bytes]]:
    """Open streams until every replica answers some, and return them with what came first. The ingress learns of replicas one by one."""
    streams, heads = list[socket.socket](), list[bytes]()
    while len({replica_of(head) for head in heads}) < NUM_REPLICAS:
        assert len(streams) < 16 * NUM_REPLICAS, "a replica gets no request"
        streams.append(open_stream(app, fields))
        heads.append(read_until(streams[-1], b'"text"'))
    return streams, heads


def check_killed_replica(nodes: Cluster, app: App, ends_first: str) -> None:
    """Kill a replica's actor or its server: streams that run there end with one error, everything else is answered."""
    text = complete(app, {"prompt": [5, 6], "max_tokens": 4, "temperature": 0})["choices"][0]["text"]
    fields = {"prompt": [5, 6], "max_tokens": 1000, "temperature": 0}
    streams, heads = streams_on_all_replicas(app, fields)
    names = [replica_of(head) for head in heads]
    victim = servers(nodes)[0]
    status = Path(f"/proc/{victim}/status").read_text()
    (actor,) = {int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:")}
    with ThreadPoolExecutor(8) as pool:
        os.kill(actor if ends_first == "actor" else victim, signal.SIGKILL)
        later = [pool.submit(complete, app, {"prompt": [5, 6], "max_tokens": 4, "temperature": 0}) for _ in range(16)]
        rests = [head + read_until(stream, b"data: [DONE]\n\n") for head, stream in zip(heads, streams, strict=True)]
        assert {reply.result()["choices"][0]["text"] for reply in later} == {text}
    for stream in streams:
        stream.close()
    ends = [(rest.count(b'data: {"error":'), rest.count(b'"finish_reason":"length"')) for rest in rests]
    assert set(ends) == {(1, 0), (0, 1)}
    # One that had produced its last token before may have ended well.
    assert len({name for name, end in zip(names, ends, strict=True) if end == (1, 0)}) == 1
    until(lambda: len(servers(nodes)) == NUM_REPLICAS, "the replica was not replaced", 180)


@contextlib.contextmanager
def traffic(app: App, num_clients: int, num_prompt_tokens: int = 2) -> Iterator[list[str]]:
    """Send requests from several clients without a pause; yields the replicas that answered. No request may fail.

    Every other reply is streamed. Prompts are different, so that no replica has their pages.
    """
    is_over, answered, numbers = threading.Event(), list[str](), itertools.count(5)

    def send() -> None:
        while not is_over.is_set():
            number = next(numbers)
            body = {"prompt": [number % 300] * num_prompt_tokens, "max_tokens": 40, "temperature": 0}
            if number % 2:
                reply = complete(app, body)
                assert reply["usage"]["completion_tokens"] == 40
                answered.append(reply["replica"])
            else:
                with open_stream(app, body) as stream:
                    whole = read_until(stream, b"data: [DONE]\n\n")
                assert whole.count(b'"finish_reason":"length"') == 1 and b'data: {"error":' not in whole
                answered.append(replica_of(whole).partition(b":")[2].strip().decode())

    with ThreadPoolExecutor(num_clients) as pool:
        clients = [pool.submit(send) for _ in range(num_clients)]
        try:
            yield answered
        finally:
            is_over.set()
        for client in clients:
            client.result()


def test_replicas_are_added_while_prompts_wait(nodes: Cluster) -> None:
    with nodes.deployed(FAKE, **SMALL | {"replicas": 1, "max_replicas": 3, "target_queued_tokens": 1000}) as app:
        assert len(servers(nodes)) == 1
        with traffic(app, 24, num_prompt_tokens=400) as answered:
            until(lambda: len(servers(nodes)) == 3, "no replica was added", 180)
            until(lambda: len(set(answered)) == 3, "a new replica got no request", 60)


def test_an_update_and_a_drained_node_lose_no_request(nodes: Cluster) -> None:
    """The last test of these nodes: one is drained."""
    with nodes.deployed(FAKE, **SMALL | {"replicas": 2}) as app:
        with traffic(app, 4) as answered:
            until(lambda: len(answered) > 20, "no replies", 60)
            before = set(answered)
            app.update(max_imbalance_tokens=1000)
            answered.clear()
            until(lambda: len(answered) > 20, "no replies after the update", 60)
            assert not before & set(answered[10:]), "the replicas are new ones"
        with traffic(app, 4) as answered:
            until(lambda: len(answered) > 20, "no replies", 60)
            drain_node(nodes, 1)
            until(lambda: not set(processes_on(nodes.hosts[1])) & set(servers(nodes)), "the node was not drained", 180)
            answered.clear()
            until(lambda: len(answered) > 20, "no replies after the node was drained", 60)
        assert len(servers(nodes)) == 2, "both replicas run on the other node"
