"""Listening sockets, and the HTTP server that accepts connections on them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, cast

from aiohttp import web

from jaxserve.config import ConnectionConfig
from jaxserve.errors import ConfigError
from jaxserve.http.connection import Connection
from jaxserve.http.sockets.acceptor import BACKLOG, Acceptor

_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

NUM_SURPLUS: Final = 64
"""Number of connections beyond the limit that get an error reply and carry probes; further ones are closed."""
_SILENT_S: Final = 10.0
"""Time between two lines in the log about connections beyond the limit."""
HANDSHAKE_TIMEOUT_S: Final = 10.0
"""Time that a new connection may take until TLS is agreed upon."""
CLOSE_TIMEOUT_S = 1.0
"""Time that open handlers may run once the listener closes; draining has happened before."""


def bind_sockets(host: str, port: int, count: int) -> list[socket.socket]:
    """Sockets bound to one address, before anything slow happens; the first one listens already.

    The kernel shares connections out among those that listen. Raises ConfigError in one line, also when
    another server has the port.
    """
    family, address = resolve_address(host, port)
    sockets: list[socket.socket] = []
    try:
        with _bound(family, address, is_shared=False) as probe:  # two servers that share must not find each other
            address = probe.getsockname()
            if count == 1:
                sockets.append(probe.dup())
        sockets += [_bound(family, address, is_shared=True) for _ in range(count - len(sockets))]
        sockets[0].listen(BACKLOG)
    except OSError as error:
        for bound in sockets:
            bound.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror} (--host, --port)") from None
    return sockets


def is_in_use(host: str, port: int) -> bool:
    """Return True if another socket has the address; False also if it is none of this host's, which its user finds out."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = min(found, key=lambda entry: str(entry[4][0]))
        _bound(family, address, is_shared=False).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def resolve_address(host: str, port: int) -> tuple[int, Any]:
    """Return the family and the numeric address that the server listens on. Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:  # UnicodeError: an empty or too long part, as in `a..b`
        raise ConfigError(f"--host {host}: {getattr(error, 'strerror', None) or 'not the name of a host'}") from None
    return family, address


def _bound(family: int, address: Any, *, is_shared: bool) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound


class _Closed(asyncio.Protocol):
    """Closes a connection that is far too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class _ConnectionLimiter:
    """Makes one protocol per connection; caps their number."""

    def __init__(
        self, server: web.Server, config: ConnectionConfig, max_connections: int, on_surplus: Callable[[], None]
    ) -> None:
        self._config = config
        self._server = server
        self._max_connections = max_connections
        self._on_surplus = on_surplus
        self._last_line_s = float("-inf")
        self.closes_after_reply = False
        """True: new connections carry one request."""

    def limited(self) -> asyncio.Protocol:
        """Return the protocol of a connection, which depends on the number of those that are open."""
        num_surplus = len(self._server.connections) - self._max_connections
        if num_surplus >= 0:
            self._note_surplus()
        if num_surplus >= NUM_SURPLUS:
            return _Closed()
        return self._connection(self._max_connections if num_surplus >= 0 else None)

    def is_far_exceeded(self, num_shaking_hands: int) -> bool:
        """Return True if a connection beside these, whose handshakes are under way, would be closed at once."""
        is_exceeded = len(self._server.connections) + num_shaking_hands >= self._max_connections + NUM_SURPLUS
        if is_exceeded:
            self._note_surplus()
        return is_exceeded

    def unlimited(self) -> asyncio.Protocol:
        """Return the protocol of a connection on the operator's socket, of which there may be any number."""
        return self._connection(None)

    def _connection(self, exceeded: int | None) -> Connection:
        protocol = Connection(self._server, self._config, exceeded=exceeded)
        protocol.closes_after_reply = self.closes_after_reply
        return protocol

    def _note_surplus(self) -> None:
        self._on_surplus()
        now_s = asyncio.get_running_loop().time()
        if now_s - self._last_line_s >= _SILENT_S:
            self._last_line_s = now_s
            _log.warning("%d connections are open, more are refused (--max-connections)", self._max_connections)


class HttpServer:
    """Accepts connections on listening sockets that other processes may share, and owns those that are open."""

    def __init__(
        self,
        server: web.Server,
        limiter: _ConnectionLimiter,
        listeners: Sequence[socket.socket],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._server = server
        self._limiter = limiter
        self._listeners = listeners
        self._tls = tls
        self._num_shaking_hands = 0
        self._acceptor = Acceptor(self._open)

    @property
    def num_connections(self) -> int:
        """Number of connections that are open, or about to be."""
        return len(self._server.connections) + self._acceptor.num_opening

    def start_accepting(self) -> None:
        """Accept connections, those that wait in the kernel's queues first."""
        self._limiter.closes_after_reply = False
        self._acceptor.start(self._listeners)

    def replace_tls(self, tls: ssl.SSLContext) -> None:
        """Use another certificate for the connections that come from now on."""
        self._tls = tls

    def stop_accepting(self) -> None:
        """Leave new connections in the kernel's queues, and tell the clients of open ones to close them."""
        self._limiter.closes_after_reply = True
        for connection in self._server.connections:
            assert isinstance(connection, Connection), "the limiter makes every connection"
            connection.closes_after_reply = True
        self._acceptor.stop()

    async def close(self) -> None:
        """Accept no further connection, and give up those that are not open yet."""
        self.stop_accepting()
        await self._acceptor.close()

    def close_listeners(self) -> None:
        """Give up the listening sockets. Their queues stay where another process has them."""
        self.stop_accepting()
        for listener in self._listeners:
            listener.close()

    def release_idle(self) -> list[socket.socket]:
        """Return the sockets of connections that wait for a request, which are not open here any more."""
        released = [cast(Connection, connection).release() for connection in self._server.connections]
        return [found for found in released if found is not None]

    async def adopt(self, connection: socket.socket) -> None:
        """Serve a connection that another process has accepted."""
        connection.setblocking(False)
        protocol = await self._connect(connection)
        if isinstance(protocol, Connection):
            protocol.may_be_silent = True  # it may have been idle for long: `--keep-alive-timeout` ends it

    async def _open(self, connection: socket.socket) -> None:
        """Serve a connection that was accepted here. Raises OSError if the TLS handshake fails."""
        if self._tls is None or connection.family == socket.AF_UNIX:
            await self._connect(connection)
        elif self._limiter.is_far_exceeded(self._num_shaking_hands):
            connection.close()
        else:
            self._num_shaking_hands += 1
            try:
                await self._connect(
                    connection,
                    ssl=self._tls,
                    ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                    ssl_shutdown_timeout=CLOSE_TIMEOUT_S,
                )
            finally:
                self._num_shaking_hands -= 1

    async def _connect(self, connection: socket.socket, **tls: Any) -> asyncio.Protocol:
        loop = asyncio.get_running_loop()
        is_operators = connection.family == socket.AF_UNIX
        factory = self._limiter.unlimited if is_operators else self._limiter.limited
        return (await loop.connect_accepted_socket(factory, connection, **tls))[1]


@contextlib.asynccontextmanager
async def listening(
    app: web.Application,
    listeners: Sequence[socket.socket],
    config: ConnectionConfig,
    *,
    max_connections: int,
    on_surplus: Callable[[], None] = lambda: None,
    is_accepting: bool = True,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[HttpServer]:
    """Serve `app` on `listeners` inside the block; a client that leaves cancels its handler.

    on_surplus: called for each connection beyond `max_connections`. is_accepting: False: not before `start_accepting`.
    tls: for all but Unix sockets; None: plain HTTP.
    """
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=CLOSE_TIMEOUT_S)
    await runner.setup()
    assert runner.server is not None, "setup makes the server"
    limiter = _ConnectionLimiter(runner.server, config, max_connections, on_surplus)
    server = HttpServer(runner.server, limiter, listeners, tls)
    if is_accepting:
        server.start_accepting()
    try:
        yield server
    finally:
        await server.close()
        await runner.cleanup()
