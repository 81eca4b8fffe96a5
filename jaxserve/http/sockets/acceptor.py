"""Accepting of connections on listening sockets whose queues other processes may share."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

_log = logging.getLogger(__name__)

BACKLOG: Final = 1024
"""Length of a listening socket's queue, and number of connections accepted in one turn of the event loop."""
RETRY_S: Final = 1.0
"""Time until connections are accepted again after the kernel had no descriptor or memory for one."""

Open = Callable[[socket.socket], Awaitable[object]]


class Acceptor:
    """Accepts connections and opens each of them, also those accepted just before it stops.

    asyncio's server drops these: it makes no transport for a connection once it is closed, so the client gets a reset.
    """

    def __init__(self, open_connection: Open) -> None:
        """open_connection: takes an accepted socket, and returns once the connection is open; may raise OSError."""
        self._open = open_connection
        self._accepting: list[socket.socket] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._retries: dict[socket.socket, asyncio.TimerHandle] = {}

    @property
    def num_opening(self) -> int:
        """Number of accepted connections that are not open yet: the TLS handshake takes its time."""
        return len(self._opening)

    def start(self, listeners: Sequence[socket.socket]) -> None:
        """Accept the connections of these sockets, which do not block; those that wait in their queues first."""
        for listener in listeners:
            listener.listen(BACKLOG)
            self._accepting.append(listener)
            self._watch(listener)

    def stop(self) -> None:
        """Leave new connections in the queues of the sockets."""
        for retry in self._retries.values():
            retry.cancel()
        for listener in self._accepting:
            asyncio.get_running_loop().remove_reader(listener)
        self._retries.clear()
        self._accepting.clear()

    async def close(self) -> None:
        """Stop, and give up connections that are not open yet."""
        self.stop()
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _watch(self, listener: socket.socket) -> None:
        asyncio.get_running_loop().add_reader(listener, self._accept_waiting, listener)

    def _accept_waiting(self, listener: socket.socket) -> None:
        for _ in range(BACKLOG):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.error("no connection can be accepted for %g s: %s", RETRY_S, error.strerror or error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)  # it stays readable
                self._retries[listener] = loop.call_later(RETRY_S, self._watch, listener)
                return
            connection.setblocking(False)
            task = asyncio.create_task(self._open_one(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open_one(self, connection: socket.socket) -> None:
        try:
            await self._open(connection)
        except OSError as error:  # its client has left, or is not one that TLS lets in
            _log.debug("a connection was not opened: %s", error)
