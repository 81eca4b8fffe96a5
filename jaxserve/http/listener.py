"""The listening socket and the HTTP protocol's limits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.web_protocol import RequestHandler

from jaxserve.config import ConnectionConfig
from jaxserve.errors import ConfigError, InvalidRequestError, UnavailableError
from jaxserve.frontend.errors import hide_internal_error
from jaxserve.http.errors import error_response

_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

BACKLOG = 1024
NUM_SURPLUS: Final = 64
"""Number of connections beyond the limit that get an error reply and carry probes; further ones are closed."""
_SILENT_S: Final = 10.0
"""Time between two lines in the log about connections beyond the limit."""
CLOSE_TIMEOUT_S = 1.0
"""Time that open handlers may run once the listener closes; draining has happened before."""


def bind_sockets(host: str, port: int, count: int) -> list[socket.socket]:
    """Sockets bound to one address, before anything slow happens; the first one listens already.

    The kernel shares connections out among those that listen. Raises ConfigError in one line, also when
    another server has the port.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
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


class Connection(RequestHandler):
    """aiohttp's protocol. Requests that it cannot parse get an error in OpenAI's form and no traceback in the log.

    A client that left between two writes gets no traceback either.
    """

    def __init__(self, server: web.Server, config: ConnectionConfig, *, exceeded: int | None = None) -> None:
        """`exceeded`: the limit on connections, if this one is beyond it."""
        options: dict[str, Any] = {
            "access_log": None,
            "auto_decompress": False,
            "keepalive_timeout": config.keep_alive_timeout,
            "max_headers": config.max_headers,
            "max_line_size": config.max_request_line,
            "max_field_size": config.max_header_size,
        }
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._config = config
        self._exceeded = exceeded
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def is_surplus(self) -> bool:
        """True if the connection is beyond the limit: it may carry one probe."""
        return self._exceeded is not None

    def check_limit(self) -> None:
        """Raise UnavailableError if the connection is beyond the limit."""
        if self._exceeded is not None:
            raise UnavailableError(
                f"The server is busy: {self._exceeded} connections are open and no more may be (--max-connections). "
                "Please retry later."
            )

    @property
    def write_timeout_s(self) -> float:
        """A client that takes nothing for this long counts as gone."""
        return self._config.write_timeout

    async def wait_writable(self) -> None:
        """Wait until the client has taken most of what was written to the transport."""
        await self._writable.wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writable.clear()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writable.set()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, ConnectionError):
            raise exc  # the caller closes the connection
        if isinstance(exc, Exception) and not isinstance(exc, HttpProcessingError):
            response = error_response(hide_internal_error(exc, "unknown"))
        elif isinstance(exc, LineTooLong):
            text = (
                f"The request line is longer than {self._config.max_request_line} bytes (--max-request-line) or a header "
                f"than {self._config.max_header_size} (--max-header-size)."
            )
            response = error_response(InvalidRequestError(text, code="headers_too_large"), status=431)
        else:
            reason = exc.message.partition("\n")[0].rstrip(".: ") if isinstance(exc, HttpProcessingError) else status
            text = f"The request is not valid HTTP: {reason}."
            response = error_response(InvalidRequestError(text, code="invalid_http"), status)
        response.headers["Server"] = "jaxserve"
        response.force_close()
        return response


def connection_of(request: web.Request) -> Connection:
    """Return the connection that carries `request`."""
    assert isinstance(request.protocol, Connection), "the listener makes every connection"
    return request.protocol


class _ConnectionLimiter:
    """Makes one protocol per connection; caps their number and how long the first headers may take."""

    def __init__(
        self, server: web.Server, config: ConnectionConfig, max_connections: int, on_surplus: Callable[[], None]
    ) -> None:
        self._config = config
        self._server = server
        self._max_connections = max_connections
        self._on_surplus = on_surplus
        self._last_line_s = float("-inf")
        self._silent: dict[RequestHandler, asyncio.TimerHandle] = {}

    def __call__(self) -> asyncio.Protocol:
        num_surplus = len(self._server.connections) - self._max_connections
        if num_surplus >= 0:
            self._note_surplus()
        if num_surplus >= NUM_SURPLUS:
            return _Closed()
        exceeded = self._max_connections if num_surplus >= 0 else None
        protocol = Connection(self._server, self._config, exceeded=exceeded)
        self._silent[protocol] = asyncio.get_running_loop().call_later(
            self._config.header_timeout, self._close_silent, protocol
        )
        return protocol

    def _note_surplus(self) -> None:
        self._on_surplus()
        now_s = asyncio.get_running_loop().time()
        if now_s - self._last_line_s >= _SILENT_S:
            self._last_line_s = now_s
            _log.warning("%d connections are open, more are refused (--max-connections)", self._max_connections)

    def has_spoken(self, protocol: RequestHandler) -> None:
        timer = self._silent.pop(protocol, None)
        if timer is not None:
            timer.cancel()

    def _close_silent(self, protocol: RequestHandler) -> None:
        if self._silent.pop(protocol, None) is not None:
            protocol.force_close()


@contextlib.asynccontextmanager
async def listening(
    app: web.Application,
    listener: socket.socket,
    config: ConnectionConfig,
    *,
    max_connections: int,
    on_surplus: Callable[[], None] = lambda: None,
) -> AsyncIterator[None]:
    """Serve `app` on `listener` inside the block; a client that leaves cancels its handler.

    on_surplus: called for each connection beyond `max_connections`.
    """
    limiter: _ConnectionLimiter | None = None

    @web.middleware
    async def note_speaker(request: web.Request, handler: Handler) -> web.StreamResponse:
        if limiter is not None:
            limiter.has_spoken(request.protocol)
        return await handler(request)

    app.middlewares.insert(0, note_speaker)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=CLOSE_TIMEOUT_S)
    await runner.setup()
    assert runner.server is not None, "setup makes the server"
    limiter = _ConnectionLimiter(runner.server, config, max_connections, on_surplus)
    server = await asyncio.get_running_loop().create_server(limiter, sock=listener, backlog=BACKLOG)
    try:
        yield
    finally:
        server.close()
        await runner.cleanup()
