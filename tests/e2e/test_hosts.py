"""One model over two hosts, each a process of its own: the tokens of one process, and one error if a host dies."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.e2e.hosts import WORKER, Replica, golden_tokens, greedy_body, greedy_tokens, running_hosts
from tests.e2e.http_server import Server, children_of, command_of, until
from tests.e2e.real_server import model
from tests.e2e.test_http_raw import open_post, read_until

pytestmark = pytest.mark.slow

STOPPED = b"The engine stopped while the request was running."
NUM_TOKENS = 32


def host_metric(server: Server, name: str, host: int) -> float:
    return server.metric(f'{name}{{engine="0",host="{host}",model_name="tiny"}}')


def test_two_hosts_give_the_tokens_of_one_and_survive_the_death_of_a_worker(programs: Path, tmp_path: Path) -> None:
    expected = golden_tokens(model(), NUM_TOKENS)
    profiles = ("--profile-dir", str(tmp_path), "--public-commands")
    with running_hosts(model(), 2, 2, *profiles, programs=programs) as replica:
        server = replica.server
        assert greedy_tokens(server, model(), NUM_TOKENS) == expected
        check_that_both_hosts_are_seen(server)
        check_that_both_hosts_are_profiled(replica, tmp_path)
        check_that_each_host_read_its_half(replica)
        check_that_a_killed_worker_ends_each_request_once(replica)
        replica.await_back()
        assert greedy_tokens(server, model(), NUM_TOKENS) == expected
        report = json.loads(server.request("GET", "/startup")[2])
        assert report["start"] == "warm", "every host has its own compile cache"
        assert server.metric("engine_restarts_total") == 1
        (worker,) = (pid for pid in children_of(replica.hosts[0].process.pid) if WORKER in command_of(pid))
        assert replica.stop() == [0, 0]
        assert not Path(f"/proc/{worker}").exists()


def check_that_both_hosts_are_seen(server: Server) -> None:
    assert [host_metric(server, "host_up", host) for host in (0, 1)] == [1, 1]
    server.await_metric('host_steps_total{engine="0",host="1",', host_metric(server, "host_steps_total", 0))
    assert host_metric(server, "host_steps_total", 1) > 0
    assert host_metric(server, "host_memory_bytes", 1) > 0
    assert server.metric("host_broadcast_bytes_total") > 0


def check_that_both_hosts_are_profiled(replica: Replica, folder: Path) -> None:
    assert replica.server.request("POST", "/start_profile")[0] == 200
    greedy_tokens(replica.server, model(), 4)
    assert replica.server.request("POST", "/stop_profile")[0] == 200
    until(lambda: all("wrote a profile" in each.output for each in (replica.server, *replica.hosts)), "no profile")
    assert len(list(folder.rglob("*.xplane.pb"))) == 2


def check_that_each_host_read_its_half(replica: Replica) -> None:
    """Only norms are on both hosts."""
    lines = [re.search(r"read (\d+) of (\d+) stored bytes", each.output) for each in (replica.server, *replica.hosts)]
    (first, total), (second, _) = [tuple(map(int, line.groups())) for line in lines if line]
    assert max(first, second) < 0.51 * total
    assert first + second >= total


def check_that_a_killed_worker_ends_each_request_once(replica: Replica) -> None:
    server = replica.server
    streams = [open_post(server, greedy_body(model(), 470, stream=True)) for _ in range(2)]
    for stream in streams:
        read_until(stream, b'"text"')
    os.kill(replica.worker_pid(1), signal.SIGKILL)
    for stream in streams:
        rest = read_until(stream, b"data: [DONE]\n\n")
        assert (rest.count(b'data: {"error":'), rest.count(STOPPED)) == (1, 1)
        stream.close()
    assert server.request("GET", "/live")[0] == 200, "the server lives, and starts the engine again"
    assert server.request("GET", "/health")[0] == 503, "it does not serve meanwhile"
