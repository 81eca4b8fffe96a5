"""One HTTP connection: its limits of time and size, and how it leaves this process for another."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import weakref
from collections.abc import AsyncIterator
from typing import Any, Final

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.web_protocol import RequestHandler

from jaxserve.config import ConnectionConfig
from jaxserve.errors import InvalidRequestError, UnavailableError
from jaxserve.frontend.errors import hide_internal_error
from jaxserve.http.errors import error_response

_FIRST_PROBE_S: Final = 0.01
"""Time between the end of a client's input and the first bytes that show whether it still reads; doubles with each."""
_LONGEST_PROBE_S: Final = 2.56
_PROBE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
"""An interim response: clients skip any number of them before a reply (RFC 9110, 15.2)."""


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
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, **options)
        loop.call_later(config.header_timeout, _close_silent, weakref.ref(self))
        self._config = config
        self._exceeded = exceeded
        self._writable = asyncio.Event()
        self._writable.set()
        self._has_input = False
        """True if bytes have arrived since the last reply."""
        self.closes_after_reply = False
        """True: replies that begin from now on are the last of the connection, and their headers say so."""
        self.stream_probe = b""
        """Bytes without meaning that may follow what was written of the current reply; empty if there are none."""
        self.may_be_silent = False
        """True: no request has to come within `--header-timeout`."""
        self._num_replies = 0
        self._is_half_closed = False
        """True: the client sends no more, and waits for replies or has left."""

    @property
    def is_surplus(self) -> bool:
        """True if the connection is beyond the limit: it may carry one probe."""
        return self._exceeded is not None

    @property
    def is_operators(self) -> bool:
        """True on the operator's Unix socket (--admin-socket)."""
        found = None if self.transport is None else self.transport.get_extra_info("socket")
        return found is not None and found.family == socket.AF_UNIX

    def check_limit(self) -> None:
        """Raise UnavailableError if the connection is beyond the limit."""
        if self._exceeded is not None:
            raise UnavailableError(
                f"The server is busy: {self._exceeded} connections are open and no more may be (--max-connections). "
                "Please retry later."
            )

    @contextlib.asynccontextmanager
    async def patience(self) -> AsyncIterator[None]:
        """Raise ConnectionResetError if the block, which writes, takes longer than `--write-timeout`."""
        longest_s = self._config.write_timeout
        try:
            async with asyncio.timeout(longest_s):
                yield
        except TimeoutError:
            if self.transport is not None:
                self.transport.abort()  # closing would wait for the client, for ever
            raise ConnectionResetError(f"the client took nothing for {longest_s:g} s") from None

    async def wait_writable(self) -> None:
        """Wait until the client has taken most of what was written to the transport."""
        await self._writable.wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writable.clear()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._has_input = True
        super().data_received(data)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        async with self.patience():
            finished = await super().finish_response(request, resp, start_time)
        self._has_input = not request.content.is_eof()
        self.stream_probe = b""
        self._num_replies += 1
        if self._is_half_closed and self._is_answered:
            resp.force_close()
        return finished

    @property
    def _is_answered(self) -> bool:
        """True if all requests of which the headers have arrived have their replies."""
        return self._num_replies == self._request_count

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True, which keeps the connection open, if the client waits for replies.

        A client that closed only its sending side looks like one that left until something is written to it: the system
        of one that left resets the connection.
        """
        if self.transport is None or self._is_answered or self.transport.get_extra_info("ssl_object") is not None:
            return False  # with TLS, asyncio closes the connection in any case
        if not self._is_half_closed:
            self._is_half_closed = True
            if not self.is_operators and hasattr(socket, "TCP_USER_TIMEOUT"):
                found: socket.socket = self.transport.get_extra_info("socket")
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._config.write_timeout * 1000))
            asyncio.get_running_loop().call_later(_FIRST_PROBE_S, self._probe, _FIRST_PROBE_S)
        return True

    def _probe(self, waited_s: float) -> None:
        """Write bytes without meaning to a client that sends no more, again and again: writing fails if it left."""
        request, transport = self._current_request, self.transport
        if transport is None or transport.is_closing():
            return
        if self._is_answered:
            transport.close()  # aiohttp would wait for the rest of a body that the reply did not need
            return
        if request is not None:
            if not request.content.is_eof() or request.version < HttpVersion11:
                transport.abort()  # the rest of the body will not come; HTTP/1.0 has no interim responses
                return
            probe = self.stream_probe if request.writer.output_size else _PROBE
            if probe and not self.writing_paused:
                transport.write(probe)
        next_s = min(2 * waited_s, _LONGEST_PROBE_S)
        asyncio.get_running_loop().call_later(next_s, self._probe, next_s)

    def release(self) -> socket.socket | None:
        """Return the socket, and forget the connection here, if it waits for a request; None if it does not.

        Bytes that arrive from now on stay in the kernel for the next process that reads from the socket. A connection with
        TLS stays: its keys are in this process.
        """
        transport = self.transport
        if transport is not None and transport.get_extra_info("ssl_object") is not None:
            return None
        is_idle = self._waiter is not None and not self._waiter.done() and not self._messages and not self._has_input
        if transport is None or transport.is_closing() or not is_idle or transport.get_write_buffer_size():
            return None
        taken: socket.socket = transport.get_extra_info("socket").dup()
        transport.abort()  # closes only this descriptor: the copy keeps the connection open
        return taken

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


def _close_silent(reference: weakref.ref[Connection]) -> None:
    """Close a connection on which the headers of a first request have not arrived."""
    connection = reference()
    if connection is not None and not connection._request_count and not connection.may_be_silent:
        connection.force_close()


def connection_of(request: web.Request) -> Connection:
    """Return the connection that carries `request`."""
    assert isinstance(request.protocol, Connection), "the listener makes every connection"
    return request.protocol
