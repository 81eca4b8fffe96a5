"""`/metrics` gives endpoint pickers what protocol 003 of the Gateway API Inference Extension asks for.

The names are read from the picker's configuration in docker/kubernetes/gateway.yaml, so that the mapping that is shipped
is the one that is tested.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.http_server import Server, running
from tests.e2e.test_http_raw import open_post, read_until
from tests.unit.docker.manifests import FOLDER, documents

pytestmark = pytest.mark.slow

NUM_RUNNING, NUM_WAITING, NUM_BLOCKS, BLOCK_SIZE = 2, 3, 64, 8
PROMPT = list(range(5, 5 + 4 * BLOCK_SIZE))
SLOW: dict[str, Any] = {"device_seconds": 0.05, "vocab_size": 384, "eos_token_ids": [], "num_blocks": NUM_BLOCKS}


def mapping() -> dict[str, str]:
    """Return the names of the metrics that the picker is configured to read."""
    (settings,) = (doc for doc in documents(FOLDER / "gateway.yaml") if doc["kind"] == "ConfigMap")
    plugins = yaml.safe_load(settings["data"]["config.yaml"])["plugins"]
    (extractor,) = (plugin["parameters"] for plugin in plugins if plugin["type"] == "core-metrics-extractor")
    (engine,) = extractor["engineConfigs"]
    assert engine.pop("name") == extractor["defaultEngine"] == "jaxserve"
    names: dict[str, str] = engine
    return names


def sample(server: Server, name: str) -> Any:
    """Return the only sample of a gauge. A picker reads the first series of a metric and adds none together."""
    families = {
        found.name: found for found in text_string_to_metric_families(server.request("GET", "/metrics")[2].decode())
    }
    assert families[name].type == "gauge"
    (found,) = families[name].samples
    return found


def test_every_metric_that_the_picker_reads_has_the_type_and_the_meaning_of_the_protocol() -> None:
    names = mapping()
    scheduler = {"max_num_seqs": NUM_RUNNING, "max_num_batched_tokens": 64}
    before = time.time()
    with running(SLOW, scheduler=scheduler, cache={"block_size": BLOCK_SIZE}, server={"api_processes": 2}) as server:
        body = {"prompt": PROMPT, "max_tokens": 200, "stream": True}
        connections = [open_post(server, body) for _ in range(NUM_RUNNING)]
        for connection in connections:
            read_until(connection, b'"text"')
        connections += [open_post(server, body) for _ in range(NUM_WAITING)]
        server.await_metric(names["queuedRequestsSpec"].removeprefix("jaxserve:") + "{", NUM_WAITING)
        assert sample(server, names["queuedRequestsSpec"]).value == NUM_WAITING
        assert sample(server, names["runningRequestsSpec"]).value == NUM_RUNNING
        usage = sample(server, names["kvUsageSpec"]).value
        assert 4 / NUM_BLOCKS < usage <= 1, "1 is 100 %: the prompt alone has 4 pages, which both requests share"
        cache = sample(server, names["cacheInfoSpec"])
        assert (int(cache.labels["block_size"]), int(cache.labels["num_gpu_blocks"])) == (BLOCK_SIZE, NUM_BLOCKS)
        adapters = sample(server, names["loraSpec"])
        assert {
            name: adapters.labels[name] for name in ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        } == {
            "max_lora": "0",
            "running_lora_adapters": "",
            "waiting_lora_adapters": "",
        }
        assert before < adapters.value < time.time(), "the time of the last change: of several series the latest counts"
        for connection in connections:
            connection.close()


def test_a_picker_without_a_key_reads_metrics_where_that_is_allowed() -> None:
    for public, status in ((False, 401), (True, 200)):
        with running(SLOW, server={"api_key": "secret", "public_metrics": public}) as server:
            assert server.request("GET", "/metrics")[0] == status
            assert server.request("GET", "/startup")[0] == 401
            assert server.request("GET", "/live")[0] == server.request("GET", "/health")[0] == 200
