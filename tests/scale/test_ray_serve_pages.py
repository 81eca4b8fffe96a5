"""KV pages that replicas on Ray Serve exchange: on one node by ports of their own, between nodes by the nodes' addresses."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs `jaxserve[ray]`: make scale-check")

from tests.e2e.http_server import until
from tests.e2e.real_server import model
from tests.programs import shared_programs
from tests.scale.network import Host, can_make_hosts
from tests.scale.ray_cluster import API_KEY, App, cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.scale,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_hosts(), reason="may not make network namespaces"),
]

PAGES_PORT = 7001
NUM_REPLICAS = 3
PROMPT = [5 + 3 * index % 200 for index in range(100)]
PAGE_TOKENS = 96
"""Tokens of the prompt's whole pages."""


def listens(host: Host) -> dict[str, str]:
    """Return the variables of a node that say where its first replica serves pages, and the secret of all replicas."""
    return {"JAXSERVE_KV_LISTEN": f"{host.address}:{PAGES_PORT}", "JAXSERVE_KV_PEER_TOKEN": "secret-of-the-replicas"}


def ask(app: App, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[str, bytes]:
    """Return the replica that answered, and its reply."""
    with contextlib.closing(http.client.HTTPConnection(app.host, app.port, timeout=120)) as connection:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        reply = connection.getresponse()
        data = reply.read()
        assert reply.status == 200, data
        return str(reply.getheader("X-Jaxserve-Replica")), data


def test_a_prefix_moves_between_replicas_of_one_node_and_of_two() -> None:
    """Two replicas fit the first node and one the second, so that whichever computes the prompt, pages move in both ways."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    few = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "kv_cache_memory": "8MiB", "cpu_kernels": "xla"}
    tiers = {"kv_offload_memory": "4MiB", "kv_fetch": "always", "kv_fetch_timeout": 60.0}
    ray = {"replicas": NUM_REPLICAS, "num_cpus": 1.5, "drain_timeout_s": 20.0, "routing": "round-robin"}
    where = {"model": str(model().path), "compile_cache": str(shared_programs() / "ray")}
    with cluster(2, cpus_per_node=2, own_words=[["--num-cpus=4"], []], variables=listens) as nodes:
        first, second = nodes.hosts
        peers = f"{first.address}:{PAGES_PORT},{first.address}:{PAGES_PORT + 1},{second.address}:{PAGES_PORT}"
        with nodes.deployed(None, **where, **few, **tiers, **ray, kv_peers=peers) as app:
            cached, texts = dict[str, int](), set[str]()

            def all_answered() -> bool:
                replica, data = ask(app, "POST", "/v1/completions", body)
                reply = json.loads(data)
                cached.setdefault(replica, reply["usage"]["prompt_tokens_details"]["cached_tokens"])
                texts.add(reply["choices"][0]["text"])
                return len(cached) == NUM_REPLICAS

            def has_stored() -> bool:
                _, data = ask(app, "GET", "/metrics")
                found = re.search(rb'kv_tier_stored_pages_total\{[^}]*tier="host"[^}]*\} (\d+)', data)
                return found is not None and int(found[1]) >= PAGE_TOKENS // 16

            all_answered()
            until(has_stored, "the pages of the first reply were not copied", 60)
            until(all_answered, "a replica gets no request", 400)
            assert list(cached.values()) == [0, PAGE_TOKENS, PAGE_TOKENS], "the first computes, the others fetch"
            assert len(texts) == 1
            fetched = dict[str, int]()

            def all_counted() -> bool:
                replica, data = ask(app, "GET", "/metrics")
                found = re.search(rb'kv_tier_fetched_pages_total\{[^}]*tier="peer"[^}]*\} (\d+)', data)
                fetched[replica] = int(found[1]) if found else 0
                return len(fetched) == NUM_REPLICAS

            until(all_counted, "a replica gets no request", 60)
            assert [fetched[replica] for replica in cached] == [0, PAGE_TOKENS // 16, PAGE_TOKENS // 16]
