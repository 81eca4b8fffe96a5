"""A server is replaced on its port, and no request fails: those under way, those of open connections, and new ones."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.http_server import Server, await_ready, children_of, replacing, running, until
from tests.e2e.test_http_lifecycle import LONG, SLOW, read_all
from tests.e2e.test_http_raw import open_post, read_until

pytestmark = pytest.mark.slow

QUICK: dict[str, Any] = {"device_seconds": 0.002, "vocab_size": 384, "eos_token_ids": []}
START_TIMEOUT_S = 240.0
"""Ends a hanging test: a server starts beside another one and its load."""
PAUSE_S = 0.05
"""Between two requests of a client, so that servers that start have a processor."""
NUM_TOKENS = 24


class Load:
    """Requests in a closed loop, on kept connections and on new ones, streamed and whole."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._is_over = asyncio.Event()
        self._ended: asyncio.Queue[None] = asyncio.Queue()
        self.failures: list[str] = []

    @contextlib.asynccontextmanager
    async def running(self, num_workers: int = 4) -> AsyncIterator[None]:
        """Send requests inside the block; the last ones have ended after it."""
        workers = [asyncio.create_task(self._work(number)) for number in range(num_workers)]
        try:
            yield
        finally:
            self._is_over.set()
            await asyncio.gather(*workers)

    async def wait_for_more(self, count: int) -> None:
        """Wait until `count` more requests have ended."""
        self._ended = asyncio.Queue()
        for _ in range(count):
            await self._ended.get()

    async def _work(self, number: int) -> None:
        keeps_connections, is_streamed = number % 4 != 3, number % 2 == 0
        connector = aiohttp.TCPConnector(force_close=not keeps_connections)
        async with aiohttp.ClientSession(connector=connector) as session:
            while not self._is_over.is_set():
                await self._send(session, is_streamed)
                await asyncio.sleep(PAUSE_S)

    async def _send(self, session: aiohttp.ClientSession, is_streamed: bool) -> None:
        body = {"model": "tiny", "prompt": "x", "max_tokens": NUM_TOKENS, "stream": is_streamed}
        try:
            async with session.post(self._url, json=body) as response:
                text = await response.text()
                end = '"finish_reason":"length"'
                if response.status != 200 or end not in text or is_streamed != ("[DONE]" in text):
                    self.failures.append(f"{response.status}: {text[:300]}")
        except aiohttp.ClientError as error:
            self.failures.append(repr(error))
        self._ended.put_nowait(None)


@pytest.fixture
def sockets() -> Iterator[Path]:
    """The directory in which the next server finds the one that runs; its path is short, as addresses must be."""
    with tempfile.TemporaryDirectory(prefix="jaxserve-test-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def replaceable(fake: dict[str, Any], sockets: Path, **server: Any) -> Iterator[Server]:
    with running(fake, server={"uds_dir": str(sockets)} | server) as first:
        yield first


def descriptors_of(pid: int) -> set[str]:
    """Return what the open file descriptors of process `pid` refer to, as the kernel names it."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.readlink(descriptor))
    return found


def connection_of(client: socket.socket) -> str:
    """Return the kernel's name of the server's end of a connection."""
    ports = [port for _, port in (client.getpeername(), client.getsockname())]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        row = line.split()
        if [int(address.rpartition(":")[2], 16) for address in row[1:3]] == ports:
            return f"socket:[{row[9]}]"
    raise AssertionError("the server has closed the connection")


async def swap(
    stack: contextlib.ExitStack, server: Server, sockets: Path, *, after_drain: bool = False, **options: Any
) -> Server:
    """Replace `server`, wait for its end, and return the next one."""
    successor = stack.enter_context(replacing(server, sockets, QUICK, after_drain=after_drain, server=options))
    await asyncio.to_thread(await_ready, successor, START_TIMEOUT_S)
    assert await asyncio.to_thread(server.process.wait, START_TIMEOUT_S) == 0, server.output
    return successor


@pytest.mark.parametrize("num_swaps", [2, pytest.param(5, marks=pytest.mark.scale)])
async def test_no_request_fails_while_the_server_is_replaced_again_and_again(sockets: Path, num_swaps: int) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(replaceable(QUICK, sockets))
        load = Load(server.port)
        async with load.running():
            for number in range(num_swaps):
                server = await swap(stack, server, sockets, after_drain=number % 2 == 1)
                await load.wait_for_more(16)
        assert load.failures == []
        assert server.stop() == 0
        assert os.listdir(sockets) == []


async def test_every_api_process_hands_its_queue_and_connections_over_and_their_number_may_change(
    sockets: Path,
) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(replaceable(QUICK, sockets, api_processes=2))
        load = Load(server.port)
        async with load.running(8):
            server = await swap(stack, server, sockets, api_processes=3)
            server = await swap(stack, server, sockets, api_processes=1, after_drain=True)
            server = await swap(stack, server, sockets, api_processes=2)
        assert load.failures == []
        assert server.stop() == 0


def test_a_running_stream_ends_where_it_began_and_an_idle_connection_moves(sockets: Path) -> None:
    with replaceable(SLOW, sockets) as server:
        idle = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        idle.request("GET", "/version")
        idle.getresponse().read()
        kept = idle.sock
        stream = open_post(server, LONG | {"max_tokens": 300})
        read_until(stream, b'"text"')
        with replacing(server, sockets, SLOW) as successor:
            await_ready(successor)
            until(lambda: "serving in place of" in successor.output, "never took the port")
            until(lambda: connection_of(kept) in descriptors_of(successor.process.pid), "the connection never moved")
            idle.request("GET", "/metrics")
            text = idle.getresponse().read().decode()
            assert idle.sock is kept
            assert "process_virtual_memory_bytes" in text
            assert 'http_requests_total{engine="0",model_name="tiny",route="/version"' not in text, (
                "the old one answered"
            )
            assert b'"finish_reason":"length"' in read_until(stream, b"data: [DONE]\n\n")
            assert server.process.wait(30) == 0, server.output
            stream.close()
            idle.close()
            assert successor.stop() == 0


def test_a_reply_that_begins_during_the_handover_closes_its_connection(sockets: Path) -> None:
    with replaceable(SLOW, sockets) as server:
        data = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        connection.sendall(head.encode())  # half of the head: the connection cannot move
        with replacing(server, sockets, SLOW) as successor:
            await_ready(successor)
            until(lambda: "another process serves the port" in server.output, "never left")
            connection.sendall(b"\r\n" + data)
            reply = read_all(connection)
            assert reply.startswith(b"HTTP/1.1 200 ") and b"Connection: close\r\n" in reply
            connection.close()
            assert server.process.wait(30) == 0
            assert successor.stop() == 0


def test_a_next_server_that_fails_leaves_the_running_one_serving(sockets: Path) -> None:
    with replaceable(SLOW, sockets) as server:
        idle = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        idle.request("GET", "/version")
        idle.getresponse().read()
        engine, kept = server.engine_pid(), idle.sock
        for number, after_drain in enumerate((False, True), start=1):
            with replacing(server, sockets, {"start_error": "broken weights"}, after_drain=after_drain) as successor:
                assert successor.process.wait(60) == 2
                successor.reader.join(10)
                assert "broken weights" in successor.output
            until(lambda number=number: server.output.count("this one goes on serving") == number, "never noticed")
            body = json.dumps({"prompt": "x", "max_tokens": 2})
            idle.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            with idle.getresponse() as reply:
                assert reply.status == 200 and reply.read()
            assert idle.sock is kept, "it was held while no engine ran"
            assert server.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
            assert (server.engine_pid() != engine) is after_drain
        idle.close()
        with replacing(server, sockets, SLOW) as successor:
            await_ready(successor)
            assert server.process.wait(30) == 0
            assert successor.stop() == 0


def test_after_drain_two_engines_never_run_at_the_same_time(sockets: Path) -> None:
    with replaceable(SLOW, sockets) as server:
        stream = open_post(server, LONG | {"max_tokens": 300})
        read_until(stream, b'"text"')
        with replacing(server, sockets, SLOW, after_drain=True) as successor:
            until(lambda: "new connections wait" in server.output, "never began to drain")
            waiting = open_post(server, {"prompt": "y", "max_tokens": 2})
            assert b"[DONE]" in read_until(stream, b"data: [DONE]\n\n")
            assert children_of(successor.process.pid) == []
            await_ready(successor)
            assert b" 200 " in read_until(waiting, b"\r\n\r\n").splitlines()[0]
            waiting.close()
            stream.close()
            assert server.process.wait(30) == 0
            assert successor.stop() == 0


def test_requests_that_take_too_long_end_with_an_error(sockets: Path) -> None:
    with replaceable(SLOW, sockets, upgrade_timeout=0.2) as server:
        stream = open_post(server, LONG)
        read_until(stream, b'"text"')
        with replacing(server, sockets, SLOW) as successor:
            assert b'{"error":{"message":"The server is shutting down."' in read_all(stream)
            stream.close()
            assert server.process.wait(30) == 0
            assert successor.stop() == 0


def test_a_second_next_server_is_refused_and_a_signal_still_ends_the_first(sockets: Path) -> None:
    with replaceable(SLOW, sockets) as server:
        stream = open_post(server, LONG)
        read_until(stream, b'"text"')
        with replacing(server, sockets, SLOW, after_drain=True) as successor:
            until(lambda: "new connections wait" in server.output, "never began to drain")
            with replacing(server, sockets, SLOW) as third:
                assert third.process.wait(60) == 2
                third.reader.join(10)
                assert "cannot be replaced now" in third.output
            server.process.send_signal(signal.SIGTERM)
            server.process.send_signal(signal.SIGINT)
            assert b"shutting down" in read_all(stream)
            assert server.process.wait(30) == 0
            await_ready(successor)
            assert successor.request("GET", "/ready")[0] == 200
            assert successor.stop() == 0
            stream.close()


def test_a_server_over_several_hosts_keeps_its_port(sockets: Path) -> None:
    """The processes on its other hosts would not be replaced."""
    sections: dict[str, Any] = {
        "hosts": {"num_hosts": 2, "host_rank": 0, "coordinator": "127.0.0.1:7600"},
        "parallel": {"tensor_parallel_size": 2},
    }
    with running(SLOW, server={"uds_dir": str(sockets)}, **sections) as server:
        engine = server.engine_pid()
        with replacing(server, sockets, SLOW) as successor:
            assert successor.process.wait(60) == 2
            successor.reader.join(10)
            assert "cannot be replaced now: it spans several hosts" in successor.output
        assert server.engine_pid() == engine
        assert server.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


def test_an_address_for_pages_that_the_running_engine_has_is_named_before_an_engine_starts(sockets: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        tiers = {"kv_listen": f"127.0.0.1:{free.getsockname()[1]}", "kv_offload_memory": 1 << 20}
    with running(SLOW, server={"uds_dir": str(sockets)}, tiers=tiers) as server:
        with replacing(server, sockets, {"start_error": "an engine started"}, tiers=tiers) as successor:
            assert successor.process.wait(60) == 2
            successor.reader.join(10)
            assert f"--kv-listen {tiers['kv_listen']}: in use" in successor.output
            assert "use --after-drain or another port" in successor.output
        with replacing(server, sockets, SLOW, after_drain=True, tiers=tiers) as successor:
            await_ready(successor)
            assert server.process.wait(30) == 0
            assert successor.stop() == 0


def test_without_a_server_there_is_one_line(sockets: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        nothing = Server(process=None, port=other.getsockname()[1])  # type: ignore[arg-type]
        with replacing(nothing, sockets) as successor:
            assert successor.process.wait(60) == 2
            successor.reader.join(10)
            errors = [line for line in successor.lines if line.startswith("jaxserve: error: ")]
            assert errors == [line for line in errors if "no server to replace" in line and str(nothing.port) in line]
            assert len(errors) == 1
