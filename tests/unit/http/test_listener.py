"""The listening socket."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from aiohttp import web

from jaxserve.config import ConnectionConfig
from jaxserve.http.listener import BACKLOG, bind_sockets, listening

KERNEL_LIMIT = int(Path("/proc/sys/net/core/somaxconn").read_text())


async def test_a_burst_of_connections_waits_in_the_kernel() -> None:
    with bind_sockets("127.0.0.1", 0, 1)[0] as listener:
        async with listening(web.Application(), [listener], ConnectionConfig(), max_connections=1):
            state = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    (longest_queue,) = struct.unpack_from("I", state, 28)  # tcpi_sacked, whose meaning for a listening socket this is
    assert longest_queue == min(BACKLOG, KERNEL_LIMIT)
