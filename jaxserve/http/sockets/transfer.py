"""Open connections that move from one server process to another, over a Unix socket that only their owner can reach.

A moved connection waits for a request: no byte of it has been read. Its client notices nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from jaxserve.http.listener import HttpServer

_log = logging.getLogger(__name__)

_BATCH: Final = 128
"""Connections per message; the kernel takes at most 253."""
POLL_S: Final = 0.02
"""Time between two looks for connections that have become idle."""

Adopt = Callable[[socket.socket], Awaitable[None]]


@contextlib.asynccontextmanager
async def receiving(path: Path, adopt: Adopt) -> AsyncIterator[None]:
    """Take connections that other processes send to `path` inside the block, and give each to `adopt`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with contextlib.suppress(FileNotFoundError):  # the socket of a process that died in this place
            os.unlink(path)
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        tasks: set[asyncio.Task[None]] = set()
        tasks.add(asyncio.create_task(_accept_senders(listener, adopt, tasks)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


async def released(server: HttpServer) -> AsyncIterator[list[socket.socket]]:
    """Yield connections of `server` once they are idle, until none is left. No process reads from them."""
    while server.num_connections:
        yield server.release_idle()
        await asyncio.sleep(POLL_S)


async def move_connections(server: HttpServer, path: str, held: Sequence[socket.socket] = ()) -> None:
    """Send `held`, and every connection of `server` once it is idle, to the process that receives at `path`.

    Returns when `server` has no connection left. Raises OSError if that process is gone; connections that were not sent
    stay with `server`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        await asyncio.to_thread(channel.connect, path)
        await asyncio.to_thread(_send, channel, held)
        async for idle in released(server):
            await asyncio.to_thread(_send, channel, idle)


def _send(channel: socket.socket, connections: Sequence[socket.socket]) -> None:
    """Send sockets, and close them here."""
    try:
        for first in range(0, len(connections), _BATCH):
            batch = connections[first : first + _BATCH]
            socket.send_fds(channel, [b"c"], [connection.fileno() for connection in batch])
    finally:
        for connection in connections:
            connection.close()


async def _accept_senders(listener: socket.socket, adopt: Adopt, tasks: set[asyncio.Task[None]]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        channel, _ = await loop.sock_accept(listener)
        tasks.add(asyncio.create_task(_receive(channel, adopt)))


async def _receive(channel: socket.socket, adopt: Adopt) -> None:
    """Adopt the connections of one sender until it hangs up."""
    with channel:
        while True:
            await _readable(channel)
            try:
                data, descriptors, _, _ = socket.recv_fds(channel, 1, _BATCH)
            except OSError:  # the sender was killed
                return
            for connection in [socket.socket(fileno=descriptor) for descriptor in descriptors]:
                try:
                    await adopt(connection)
                except OSError as error:  # its client has left meanwhile
                    connection.close()
                    _log.debug("a connection was lost on its way: %s", error)
            if not data:
                return


async def _readable(channel: socket.socket) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(channel, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(channel)
