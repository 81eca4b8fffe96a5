"""Several API processes on one port are one server: one set of numbers, one drain, one end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.http_server import Server, children_of, running, until
from tests.e2e.test_http_lifecycle import ENDLESS, SLOW, UNENDING, is_alive, read_all, start_error
from tests.e2e.test_http_raw import open_post, read_until
from tests.processes import freeze, frozen, is_pending

pytestmark = pytest.mark.slow

TWO: dict[str, Any] = {"api_processes": 2}


def children(server: Server) -> list[int]:
    """The engine and the further API processes, in no order: one that was replaced comes last."""
    return children_of(server.process.pid)


def further_process(server: Server) -> int:
    """The second of two API processes; the first is the parent."""
    return server.child_pid("jaxserve.runtime.api_workers")


def open_streams(server: Server, count: int) -> list[socket.socket]:
    """Streams that have begun, at an engine that is UNENDING: so many that the kernel gives both processes some."""
    connections = [open_post(server, ENDLESS) for _ in range(count)]
    for connection in connections:
        read_until(connection, b'"text"')
    return connections


def rest_of(stream: socket.socket) -> bytes:
    """Return the rest of a stream; empty if its process died."""
    with stream:
        try:
            return read_all(stream)
        except ConnectionResetError:
            return b""


def until_done(stream: socket.socket) -> bytes:
    """Return the rest of a stream, whose connection stays open; empty if its process died."""
    with stream:
        try:
            return read_until(stream, b"data: [DONE]\n\n")
        except (ConnectionResetError, AssertionError):
            return b""


def connections_of(pid: int, port: int) -> int:
    """Established connections of the server's `port` that process `pid` holds."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            inodes.add(os.readlink(descriptor))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" and f"socket:[{row[9]}]" in inodes for row in rows)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Two processes for tests that end none of them."""
    with running(UNENDING, server=TWO) as server:
        yield server
        assert server.stop() == 0


def test_any_process_tells_the_totals() -> None:
    with running({"vocab_size": 384, "eos_token_ids": []}, server=TWO) as server:
        for _ in range(16):
            assert server.request("POST", "/v1/completions", {"prompt": [5, 6], "max_tokens": 4})[0] == 200
        label = 'engine="0",model_name="tiny"'
        for sample, value in (
            (f'request_success_total{{{label[:10]},finished_reason="length"', 16),
            ("generation_tokens_total", 64),
            ("prompt_tokens_total", 32),
            ("e2e_request_latency_seconds_count", 16),
        ):
            server.await_metric(sample, value)
            assert {server.metric(sample) for _ in range(8)} == {value}
        text = server.request("GET", "/metrics")[2].decode()
        assert text.count("# TYPE jaxserve:generation_tokens_total counter") == 1
        assert server.stop() == 0


def test_processes_share_connections_and_seeds_never_meet(server: Server) -> None:
    texts = []
    for _ in range(24):
        status, _, reply = server.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 24})
        assert status == 200
        texts.append(json.loads(reply)["choices"][0]["text"])
    # The fake model's text knows a seed modulo its vocabulary: a few of 24 may meet there. With one stream of seeds
    # in both processes about half of them would.
    assert len(set(texts)) >= 19
    streams = open_streams(server, 24)
    pids = server.process.pid, further_process(server)

    def held() -> list[int]:
        return [connections_of(pid, server.port) for pid in pids]

    until(lambda: sum(held()) == 24, "connections of earlier requests stay open")
    assert min(held()) > 0, server.output
    for stream in streams:
        stream.close()


def test_port_of_another_server_is_refused_although_it_could_be_shared(server: Server) -> None:
    assert f"port {server.port}" in start_error(server=TWO | {"port": server.port})


def test_sigterm_drains_every_process() -> None:
    with running(SLOW, server=TWO) as server:
        pids = children(server)
        body = {"prompt": "x", "max_tokens": 150, "stream": True}
        streams = [open_post(server, body) for _ in range(12)]
        for stream in streams:
            read_until(stream, b'"text"')
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            assert b'"finish_reason":"length"' in read_until(stream, b"data: [DONE]\n\n")
            stream.close()
        assert server.process.wait(30) == 0
        assert not any(map(is_alive, pids))


def test_second_signal_ends_every_process_at_once() -> None:
    with running(UNENDING, server=TWO) as server:
        pids = children(server)
        streams = open_streams(server, 12)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.request("GET", "/ready")[0] == 503, "never drained")
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            assert b'"error"' in rest_of(stream)
        assert server.process.wait(30) == 0
        assert not any(map(is_alive, pids))


def test_a_busy_process_learns_of_the_second_signal() -> None:
    with running(UNENDING, server=TWO) as server:
        busy = further_process(server)
        streams = open_streams(server, 12)
        with frozen(busy):
            server.process.send_signal(signal.SIGTERM)
            until(lambda: is_pending(busy, signal.SIGTERM), "the first signal was not passed on")
            server.process.send_signal(signal.SIGTERM)
            until(lambda: connections_of(server.process.pid, server.port) == 0, "never ended its own streams")
        for stream in streams:
            assert b'"error"' in rest_of(stream)
        assert server.process.wait(30) == 0


@pytest.mark.parametrize("victim", ["engine", "api_worker"])
def test_death_of_one_process_ends_all_requests_and_the_server(victim: str) -> None:
    """Connections of a dead API process break, so its clients receive no error."""
    with running(UNENDING, server=TWO | {"engine_restarts": 0}) as server:
        pids = children(server)
        streams = open_streams(server, 12)
        further = further_process(server)
        num_lost = connections_of(further, server.port) if victim == "api_worker" else 0
        os.kill(server.engine_pid() if victim == "engine" else further, signal.SIGKILL)
        replies = [rest_of(stream) for stream in streams]
        assert sum(b'"error"' not in reply for reply in replies) == num_lost
        assert server.process.wait(30) == 1
        assert not any(map(is_alive, pids))


def test_a_process_that_dies_or_freezes_is_replaced_alone() -> None:
    with running(UNENDING, server=TWO | {"stall_timeout": 5, "engine_restarts": 2}) as server:
        engine, further = server.engine_pid(), further_process(server)
        streams = [open_post(server, {"prompt": "x", "max_tokens": 150, "stream": True}) for _ in range(12)]
        for stream in streams:
            read_until(stream, b'"text"')
        num_lost = connections_of(further, server.port)
        os.kill(further, signal.SIGKILL)
        assert sum(b'"length"' not in until_done(stream) for stream in streams) == num_lost
        until(lambda: len(children(server)) == 2, "no process followed")
        (next_one,) = set(children(server)) - {engine}
        for stream in open_streams(server, 12):
            stream.close()
        assert is_alive(next_one), "it has begun to serve"
        freeze(next_one)
        until(lambda: "gave no sign of life for 5 s and was killed; starting it again" in server.output, "not missed")
        until(lambda: len(children(server)) == 2 and next_one not in children(server), "no process followed")
        streams = open_streams(server, 12)  # those in the queue of the frozen one as well
        held = [connections_of(pid, server.port) for pid in (server.process.pid, *set(children(server)) - {engine})]
        assert sum(held) == 12
        for stream in streams:
            stream.close()
        assert engine in children(server) and server.stop() == 0


def test_further_processes_do_not_outlive_the_first() -> None:
    with running(SLOW, server=TWO) as server:
        pids = children(server)
        server.process.kill()
        server.process.wait()
        until(lambda: not any(map(is_alive, pids)), "somebody outlived the server")
