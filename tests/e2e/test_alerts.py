"""Faults of real servers reach an operator: Prometheus scrapes them, alerts fire, Alertmanager posts them."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jaxserve.tools.bench.startup import free_port
from tests.e2e.http_server import Server, running, started, until
from tests.e2e.monitors import ALERTMANAGER, PROMETHEUS, monitoring
from tests.e2e.test_http_raw import open_post, read_until
from tests.processes import freeze

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROMETHEUS is None or ALERTMANAGER is None,
        reason="no Prometheus or no Alertmanager on this machine: apt-get install prometheus prometheus-alertmanager",
    ),
]

KEY = "key-of-the-test"
STREAM: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 1000, "temperature": 0, "stream": True}


def reply_seconds(server: Server) -> float:
    """Return how long the server takes to answer /metrics: the longest of five times."""
    times = [time.monotonic()]
    for _ in range(5):
        server.request("GET", "/metrics")
        times.append(time.monotonic())
    return max(end - begin for begin, end in pairwise(times))


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def requests(server: Server) -> Iterator[None]:
    """Requests of a few tokens, one after the other, whatever becomes of them."""
    is_over = threading.Event()

    def send() -> None:
        while not is_over.wait(0.02):
            server.request("POST", "/v1/completions", {"prompt": [7], "max_tokens": 2})

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_faults_of_servers_are_posted(tmp_path: Path) -> None:
    """One server computes slowly, loses a step, is frozen, loses its engine and ends; another one never loads."""
    fake = {"fail_at_steps": (1,), "device_seconds": 0.6, "vocab_size": 384, "eos_token_ids": []}
    section = {"api_key": KEY, "stall_timeout": 0, "engine_restarts": 10**6}
    scheduler = {"max_num_seqs": 2, "max_queued_requests": 2}
    with (
        running(fake, server=section, scheduler=scheduler) as server,
        started({"hangs_at_start": True}, server={"api_key": KEY, "port": (port := free_port())}) as loading,
    ):
        server.api_key = loading.api_key = KEY
        loading.port = port
        until(lambda: is_open(port), "the server that loads does not listen")
        at, at_loading = (f"127.0.0.1:{one.port}" for one in (server, loading))
        with monitoring(tmp_path, [at, at_loading], KEY, reply_seconds(server)) as received:
            with requests(loading):
                received.wait_for("JaxserveNotServing", at_loading)
                received.wait_for("JaxserveErrors", at_loading)
            server.request("POST", "/v1/completions", {"prompt": [7], "max_tokens": 3})
            received.wait_for("JaxserveStepsFail", at)
            streams = [open_post(server, STREAM) for _ in range(4)]
            read_until(streams[0], b'"text"')
            received.wait_for("JaxserveSlowTokens", at)
            received.wait_for("JaxserveQueueFull", at)
            with requests(server):
                received.wait_for("JaxserveRequestsRefused", at)
            freeze(server.engine_pid())
            received.wait_for("JaxserveStalled", at)
            os.kill(server.engine_pid(), signal.SIGKILL)
            received.wait_for("JaxserveEngineRestarted", at)
            server.process.kill()
            posted = received.wait_for("JaxserveDown", at)
            assert posted["annotations"]["runbook"] == "docs/runbook.md#jaxservedown"
            assert at in posted["annotations"]["summary"]
            of_loading = {alert for alert, instance in received.fired if instance == at_loading}
            assert not of_loading & {"JaxserveStepsFail", "JaxserveQueueFull", "JaxserveStalled", "JaxserveSlowTokens"}
            for stream in streams:
                stream.close()
