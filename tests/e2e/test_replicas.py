"""`--replicas`: several engines on one port, with fake engines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.http_server import Server, await_ready, children_of, command_of, running, started, until
from tests.e2e.test_api_processes import open_streams
from tests.e2e.test_http_lifecycle import LONG, SLOW, UNENDING
from tests.e2e.test_http_raw import open_post, read_until
from tests.processes import freeze, frozen

pytestmark = pytest.mark.slow

STOPPED = b"The engine stopped while the request was running."
NUM_GROUPS, NUM_TURNS, PREFIX_TOKENS = 8, 6, 320


def engines_of(server: Server) -> list[int]:
    """Return the engine processes in the order of their start."""
    return [pid for pid in children_of(server.process.pid) if b"jaxserve.engine.process" in command_of(pid)]


def per_engine(server: Server, name: str) -> list[float]:
    text = server.request("GET", "/metrics")[2].decode()
    return [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"jaxserve:{name}{{")]


def complete(server: Server, prompt: list[int], **options: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0} | options
    status, _, reply = server.request("POST", "/v1/completions", body)
    assert status == 200, reply
    return str(json.loads(reply)["choices"][0]["text"])


def prefix_hits(routing: str) -> float:
    """Return the prompt tokens found in caches when conversations that share a prefix arrive in mixed order.

    The prefixes of all groups do not fit one replica, those of a quarter do.
    """
    fake = {"vocab_size": 384, "eos_token_ids": [], "num_blocks": 2 * (PREFIX_TOKENS // 16 + 4) + 20}
    with running(fake, parallel={"replicas": 4, "routing": routing}) as server:
        order = [(group, turn) for turn in range(NUM_TURNS) for group in range(NUM_GROUPS)]
        for index, (group, turn) in enumerate(order):
            if index % 3 == 2:  # round robin must not meet the groups' period
                complete(server, [1], max_tokens=1)
            complete(server, [10 + group] * PREFIX_TOKENS + [100 + turn] * 20)
        return sum(per_engine(server, "prefix_cache_hits_total"))


def test_exact_prefixes_hit_at_least_twice_as_often_as_round_robin() -> None:
    best = (NUM_TURNS - 1) * NUM_GROUPS * PREFIX_TOKENS
    by_pages, by_turns = prefix_hits("prefix"), prefix_hits("round-robin")
    assert by_pages >= 2 * by_turns
    assert by_pages >= 0.9 * best


def test_killed_replica_fails_only_streams_that_had_begun_on_it_and_comes_back(tmp_path: Path) -> None:
    sections = {"uds_dir": str(tmp_path), "engine_restarts": 10}
    with running(SLOW, parallel={"replicas": 3, "routing": "round-robin"}, server=sections) as server:
        text = complete(server, [5, 6])
        streams = [open_post(server, LONG | {"max_tokens": 300}) for _ in range(6)]
        for stream in streams:
            read_until(stream, b'"text"')
        server.await_metric('num_requests_running{engine="2",model_name="tiny"}', 2)
        victims = engines_of(server)
        os.kill(victims[1], signal.SIGKILL)
        rest = [read_until(stream, b"data: [DONE]\n\n") for stream in streams]
        assert sorted(data.count(STOPPED) for data in rest) == [0, 0, 0, 0, 1, 1]
        assert all(data.count(b'"finish_reason":"length"') + data.count(b'data: {"error":') == 1 for data in rest)
        assert server.request("GET", "/health")[0] == server.request("GET", "/ready")[0] == 200
        until(lambda: "replica 1: the engine is back after" in server.output, "it never came back")
        assert len(set(engines_of(server)) - set(victims)) == 1
        assert [complete(server, [5, 6]) for _ in range(6)] == [text] * 6
        assert server.metric('engine_restarts_total{engine="1"') == 1
        assert server.stop() == 0
        assert list(tmp_path.iterdir()) == []
        assert "Traceback" not in server.output
        for stream in streams:
            stream.close()


def test_requests_without_output_survive_the_death_of_their_engine() -> None:
    with running(SLOW, parallel={"replicas": 2, "routing": "round-robin"}) as server:
        victim = engines_of(server)[1]
        freeze(victim)
        with ThreadPoolExecutor(4) as pool:
            texts = [pool.submit(complete, server, [5, 6]) for _ in range(4)]
            server.await_metric('request_success_total{engine="0",finished_reason="length"', 2)
            os.kill(victim, signal.SIGKILL)
            assert len({text.result() for text in texts}) == 1
        assert server.metric("request_retries_total") == 2
        assert "Traceback" not in server.output


@pytest.mark.parametrize("api_processes", [1, 2])
def test_server_goes_on_without_a_replica_that_keeps_dying_and_ends_with_the_last(api_processes: int) -> None:
    sections = {"engine_restarts": 0, "api_processes": api_processes}
    with running(SLOW, parallel={"replicas": 2}, server=sections) as server:
        first, second = engines_of(server)
        os.kill(second, signal.SIGKILL)
        until(lambda: "1 of 2 replicas are left" in server.output, "the server did not notice")
        assert {server.request("GET", "/ready")[0] for _ in range(6)} == {200}
        assert len({complete(server, [5, 6]) for _ in range(6)}) == 1
        stream = open_post(server, LONG)
        read_until(stream, b'"text"')
        os.kill(first, signal.SIGKILL)
        assert read_until(stream, b"data: [DONE]\n\n").count(STOPPED) == 1
        stream.close()
        assert server.process.wait(30) == 1
        assert "Traceback" not in server.output


def test_replica_that_dies_while_the_others_still_start_comes_back() -> None:
    with started(SLOW, parallel={"replicas": 2}, server={"engine_restarts": 10}) as server:
        until(lambda: len(engines_of(server)) == 2, "the second engine was never started")
        first, second = engines_of(server)
        with frozen(second):
            os.kill(first, signal.SIGKILL)
            until(lambda: "replica 0: " in server.output, "the server did not notice")
        await_ready(server)
        until(lambda: "replica 0: the engine is back after" in server.output, "it never came back")
        assert "replicas are left" not in server.output
        assert len(engines_of(server)) == 2
        assert server.stop() == 0
        assert "Traceback" not in server.output


def test_sigterm_drains_all_replicas() -> None:
    with running(SLOW, parallel={"replicas": 2, "routing": "round-robin"}) as server:
        streams = [open_post(server, LONG | {"max_tokens": 100}) for _ in range(4)]
        for stream in streams:
            read_until(stream, b'"text"')
        ended = threading.Thread(target=server.stop)
        ended.start()
        for stream in streams:
            rest = read_until(stream, b"data: [DONE]\n\n")
            assert rest.count(b'"finish_reason":"length"') == 1 and b"error" not in rest
            stream.close()
        ended.join()
        assert server.process.returncode == 0


def test_disconnect_aborts_on_the_replica_that_computes() -> None:
    with running(UNENDING, parallel={"replicas": 2, "routing": "round-robin"}) as server:
        first, second = open_streams(server, 2)
        server.await_metric('num_requests_running{engine="1"', 1)
        first.close()
        until(lambda: sorted(per_engine(server, "num_requests_running")) == [0, 1], "the request was not aborted")
        second.close()
        until(lambda: per_engine(server, "num_requests_running") == [0, 0], "the request was not aborted")


def test_replicas_share_a_directory_of_kv_pages_and_listen_on_ports_of_their_own(tmp_path: Path) -> None:
    tiers = {"kv_offload_dir": str(tmp_path / "kv"), "kv_listen": f"127.0.0.1:{two_free_ports()}", "kv_fetch": "always"}
    fake = {"vocab_size": 384, "eos_token_ids": [], "num_blocks": 16}
    with running(fake, parallel={"replicas": 2, "routing": "round-robin"}, tiers=tiers) as server:
        for _ in range(2):
            complete(server, [7] * 64)
        until(lambda: min(per_engine(server, "kv_tier_stored_pages_total"), default=0) >= 3, "no pages were stored")
    assert len({path.parents[1] for path in tmp_path.glob("kv/*/??/*.page")}) == 2


def two_free_ports() -> int:
    """Return a port that is free, as is the one after it."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port
    raise AssertionError("no two ports are free")
