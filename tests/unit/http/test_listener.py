"""The listening socket."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from jaxserve.config import ConnectionConfig
from jaxserve.errors import ConfigError
from jaxserve.http.listener import NUM_SURPLUS, bind_sockets, listening
from jaxserve.http.sockets import acceptor
from jaxserve.http.sockets.acceptor import BACKLOG

KERNEL_LIMIT = int(Path("/proc/sys/net/core/somaxconn").read_text())


class FullListener(socket.socket):
    """A listening socket of a process that has no free descriptor three times."""

    num_failures = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if self.num_failures < 3:
            self.num_failures += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def test_a_burst_of_connections_waits_in_the_kernel() -> None:
    with bind_sockets("127.0.0.1", 0, 1)[0] as listener:
        async with listening(web.Application(), [listener], ConnectionConfig(), max_connections=1):
            state = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    (longest_queue,) = struct.unpack_from("I", state, 28)  # tcpi_sacked, whose meaning for a listening socket this is
    assert longest_queue == min(BACKLOG, KERNEL_LIMIT)


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_server_that_stops_accepting_answers_what_it_has_accepted(num_turns: int) -> None:
    """A connection is accepted in one turn of the event loop, and its transport is made in a later one."""
    with bind_sockets("127.0.0.1", 0, 1)[0] as listener:
        first = listening(web.Application(), [listener], ConnectionConfig(), max_connections=8)
        second = listening(web.Application(), [listener], ConnectionConfig(), max_connections=8, is_accepting=False)
        async with first as leaving, second as next_one:
            with socket.create_connection(listener.getsockname(), timeout=30) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                leaving.stop_accepting()
                was_accepted = leaving.num_connections > 0
                next_one.start_accepting()
                assert (await asyncio.to_thread(client.recv, 64)).startswith(b"HTTP/1.1 404")
                assert next_one.num_connections == (not was_accepted)


async def test_a_client_that_takes_no_small_replies_is_given_up() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=bytes(100_000))

    app = web.Application()
    app.router.add_get("/", answer)
    with bind_sockets("127.0.0.1", 0, 1)[0] as listener, socket.socket() as client:
        async with listening(app, [listener], ConnectionConfig(write_timeout=0.05), max_connections=8) as server:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(listener.getsockname())
            client.sendall(
                b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200
            )  # 20 MB: more than the kernel's buffers hold
            async with asyncio.timeout(20):
                while not server.num_connections:  # noqa: ASYNC110  (nothing announces it)
                    await asyncio.sleep(0)
                while server.num_connections:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)


async def test_the_operators_socket_answers_where_no_more_connections_may_be_open(tmp_path: Path) -> None:
    path = str(tmp_path / "operator.sock")
    with bind_sockets("127.0.0.1", 0, 1)[0] as listener, socket.socket(socket.AF_UNIX) as operators:
        operators.bind(path)
        operators.setblocking(False)
        listeners = [listener, operators]
        async with listening(web.Application(), listeners, ConnectionConfig(), max_connections=1) as server:
            clients = [socket.create_connection(listener.getsockname()) for _ in range(1 + NUM_SURPLUS)]
            async with asyncio.timeout(20):
                while server.num_connections < len(clients):  # noqa: ASYNC110  (nothing announces it)
                    await asyncio.sleep(0)
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert (await reader.readline()).startswith(b"HTTP/1.1 404")
                assert server.num_connections == len(clients) + 1
            for client in (writer, *clients):
                client.close()


async def test_connections_wait_while_no_descriptor_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "RETRY_S", 0.01)
    with bind_sockets("127.0.0.1", 0, 1)[0] as listener:
        failing = FullListener(fileno=listener.dup().detach())
        failing.setblocking(False)
        async with listening(web.Application(), [failing], ConnectionConfig(), max_connections=8) as server:
            with socket.create_connection(listener.getsockname(), timeout=30) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert (await asyncio.to_thread(client.recv, 64)).startswith(b"HTTP/1.1 404")
            assert failing.num_failures == 3
            failing.num_failures = 0
            with socket.create_connection(listener.getsockname()):
                while not failing.num_failures:  # noqa: ASYNC110  (nothing announces it)
                    await asyncio.sleep(0)
                server.stop_accepting()
                await asyncio.sleep(0.05)
                assert failing.num_failures == 1, "it accepts no more"
        failing.close()


def test_what_is_no_name_of_a_host_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"--host a\.\.b: not the name of a host"):
        bind_sockets("a..b", 0, 1)
