"""Starting and stopping servers, and whose CPU time is whose."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers.peer import Launch, PeerUnavailableError
from benchmarks.peers.rounds import turns
from benchmarks.peers.server import Server
from benchmarks.processes import Stat, all_processes, memory_of, parse_busy_s, parse_stat, tree_of
from jaxserve.tools.bench.startup import free_port

SERVER = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

# A child in a session of its own, which does not end with its parent.
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, str(child.pid).encode())

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(int(sys.argv[2]), b"reason")

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server(folder: Path, script: str, *, status: int = 200, timeout_s: float = 20.0) -> Server:
    port = free_port()
    launch = Launch(command=(sys.executable, "-c", script, str(port), str(status)))
    return Server("peer", launch, port, log=folder / "peer.log", start_timeout_s=timeout_s)


def are_alive(pids: set[int]) -> set[int]:
    return pids & {each.pid for each in all_processes()}


def test_a_server_is_timed_measured_and_gone_with_its_children(tmp_path: Path) -> None:
    with server(tmp_path, SERVER) as running:
        assert 0 < running.ready_s <= running.first_reply_s
        pids = {each.pid for each in running.tree()}
        assert len(pids) == 2
        assert running.cpu_s() > 0
        memory = memory_of(running.tree())
        assert 0 < memory.pss_mib <= memory.peak_rss_mib
    assert not are_alive(pids)


def test_a_server_that_ends_early_tells_why(tmp_path: Path) -> None:
    with (
        pytest.raises(PeerUnavailableError, match="peer: ended before it was ready: ValueError: no model"),
        server(tmp_path, "raise ValueError('no model')"),
    ):
        pytest.fail("it never runs")


def test_a_server_that_is_never_ready_is_stopped(tmp_path: Path) -> None:
    silent = server(tmp_path, "import time; print('loading', flush=True); time.sleep(600)", timeout_s=0.5)
    with pytest.raises(PeerUnavailableError, match="peer: not ready after"), silent:
        pytest.fail("it never runs")
    assert not silent.is_alive()


def test_a_server_that_refuses_the_first_request_is_stopped(tmp_path: Path) -> None:
    with (
        pytest.raises(PeerUnavailableError, match="answered 400 to the first request: reason"),
        server(tmp_path, SERVER, status=400),
    ):
        pytest.fail("it never runs")


def test_the_tree_holds_descendants_and_orphans_of_its_sessions() -> None:
    def stat(pid: int, parent: int, session: int) -> Stat:
        return Stat(pid, parent, session, 0.0)

    others = [stat(1, 0, 1), stat(50, 1, 50), stat(51, 50, 50)]
    tree = [stat(10, 50, 10), stat(11, 10, 10), stat(12, 11, 12), stat(13, 1, 12), stat(14, 1, 10)]
    assert {each.pid for each in tree_of(10, [*reversed(tree), *others])} == {10, 11, 12, 13, 14}


def test_a_program_may_have_any_name() -> None:
    fields = "S 7 8 9 0 -1 0 0 0 0 0 100 200 300 400 20 0"
    assert parse_stat(f"12 (a ) (b) {fields}") == Stat(12, 7, 9, pytest.approx(1000 / _ticks()))


def test_idle_and_waiting_time_is_not_busy() -> None:
    assert parse_busy_s("cpu  10 20 30 4000 5000 6 7 8 0 0") == pytest.approx(81 / _ticks())


def test_servers_take_turns_in_going_first(tmp_path: Path) -> None:
    pair = (server(tmp_path, ""), server(tmp_path, ""))
    assert [turns(number, pair)[0] is pair[0] for number in range(4)] == [True, False, True, False]


def _ticks() -> int:
    from benchmarks.processes import TICKS_PER_S

    return TICKS_PER_S
