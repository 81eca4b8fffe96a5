"""Pages of another engine, fetched over the network."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final

import numpy as np
import zmq

from jaxserve.errors import ConfigError
from jaxserve.kv.tiers.page import Page, PageLayout, copy_page
from jaxserve.kv.tiers.stats import TierStats
from jaxserve.kv.tiers.wire import (
    CURVE_BYTES,
    MAX_HASHES,
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    PageRefusal,
    PageReply,
    PageRequest,
    WireError,
    check_listener,
    endpoint_of,
    header_of,
    open_reply,
    secure_client,
)
from jaxserve.types import BlockHash

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
_NONCE_BYTES: Final = 16
_POLL_MS: Final = 10
"""Time after which a wait looks whether it was ended."""


class PeerStore:
    """The stores of one peer. One request at a time; a peer that fails is not asked again for a while."""

    tier = "peer"

    def __init__(
        self,
        layout: PageLayout,
        address: str,
        token: str,
        timeout_s: float,
        stats: TierStats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`address`: HOST:PORT. `timeout_s`: longest wait for a reply. Connecting waits for the first request; each time the host is
        resolved anew, in a thread of its own, because a resolver may take a minute."""
        self._layout = layout
        self._address = address
        self._token = token
        self._timeout_s = timeout_s
        self._stats = stats
        self._clock = clock
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._endpoint: Future[str] | None = None
        """The endpoint of the next connection, or its error; None before the host is resolved."""
        self._pause_s = 0.0
        self._retry_s = 0.0
        """Time from which the peer is asked again after a failure."""

    def num_leading(self, names: Sequence[BlockHash]) -> int:
        """Ask the peer. Returns 0 if it does not answer."""
        reply, _ = self._ask(names, 0)
        return min(reply.count, len(names)) if reply is not None else 0

    def find_first(self, names: Sequence[BlockHash]) -> int | None:
        """Ask the peer. Returns None if it does not answer."""
        reply, _ = self._ask(names, 0, finds_first=True)
        return reply.count if reply is not None and reply.count < min(len(names), MAX_HASHES) else None

    def get(self, names: Sequence[BlockHash], pages: Sequence[Page]) -> int:
        most = max(1, MAX_REPLY_BYTES // self._layout.of(names[0]).num_bytes)
        reply, frames = self._ask(names[:most], min(len(names), most))
        if reply is None:
            return 0
        for count, (frame, name, page) in enumerate(zip(frames, names, pages, strict=False)):
            row, layout = np.frombuffer(frame, np.uint8), self._layout.of(name)
            if len(row) != layout.num_bytes:
                with self._lock:
                    self._fail("peer_error", f"a page of {len(row)} bytes")
                return count
            copy_page(layout.views(row), page)
        return min(len(frames), len(pages))

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._disconnect()
            self._context.term()

    def _ask(
        self, names: Sequence[BlockHash], max_pages: int, *, finds_first: bool = False
    ) -> tuple[PageReply | None, list[Any]]:
        """Return the reply and the frames of its pages; None if the peer fails or has failed shortly before."""
        with self._lock:
            if self._closed.is_set() or self._clock() < self._retry_s:
                return None, []
            request = PageRequest(
                secrets.token_bytes(_NONCE_BYTES),
                self._layout.identity,
                list(names[:MAX_HASHES]),
                max_pages,
                self._timeout_s / 2,
                finds_first,
            )
            try:
                reply, frames = self._exchange(request)
            except (WireError, ConfigError, zmq.ZMQError) as error:
                self._fail("peer_error", str(error))
                return None, []
            if reply is None and self._closed.is_set():
                return None, []
            if reply is None:
                text = (
                    f"no reply in {self._timeout_s:g} seconds: the peer, or the resolver of its name, is gone or slow, "
                    "or the peer has another --kv-peer-token"
                )
                self._fail("peer_timeout", text)
                return None, []
            if isinstance(reply, PageRefusal):
                self._fail("peer_layout", "they have another layout")
                self._retry_s = self._clock() + _LONGEST_PAUSE_S
                return None, []
            self._pause_s = 0.0
            return reply, frames

    def _exchange(self, request: PageRequest) -> tuple[PageReply | PageRefusal | None, list[Any]]:
        """Send a request and wait for its reply; None if there is none in time."""
        deadline_s = time.monotonic() + self._timeout_s
        connection = self._connected(deadline_s)
        if connection is None:
            return None, []
        connection.send(header_of(request))
        while time.monotonic() < deadline_s and not self._closed.is_set():
            if not connection.poll(_POLL_MS):
                continue
            frames = connection.recv_multipart(copy=False)
            reply = open_reply(frames[0].bytes)
            if reply.nonce == request.nonce:
                return reply, [frame.buffer for frame in frames[1:]]
        return None, []

    def _connected(self, deadline_s: float) -> zmq.Socket[bytes] | None:
        """Return the connection; None if the host is not resolved in time: the next request waits for the same answer, unless it
        is an error, which may be over.

        Raises WireError at once if no process listens there.
        """
        if self._socket is None:
            if self._endpoint is None or (self._endpoint.done() and self._endpoint.exception() is not None):
                self._endpoint = _resolve(self._address, self._token, self._timeout_s)
            while not self._endpoint.done():
                if time.monotonic() >= deadline_s or self._closed.is_set():
                    return None
                wait([self._endpoint], _POLL_MS / 1000)
            resolved, self._endpoint = self._endpoint, None
            endpoint = resolved.result()
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
            longest = max(MAX_REQUEST_BYTES, *(each.num_bytes for each in self._layout.all))
            self._socket.setsockopt(zmq.MAXMSGSIZE, longest + CURVE_BYTES)
            secure_client(self._socket, self._token)
            self._socket.connect(endpoint)
        return self._socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _fail(self, reason: str, text: str) -> None:
        """Count a failure, and ask the peer again after a pause that doubles. Late replies are not awaited."""
        self._stats.failed(reason)
        self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
        self._retry_s = self._clock() + self._pause_s
        self._disconnect()
        _log.warning("KV pages of %s: %s; it is asked again in %g s", self._address, text, self._pause_s)


def _resolve(address: str, token: str, timeout_s: float) -> Future[str]:
    """Resolve the host of a peer in a thread, which no one waits for at the end; returns its endpoint or error.

    timeout_s: limit of the connection that is tried then, see `check_listener`.
    """
    endpoint = Future[str]()

    def run() -> None:
        try:
            found = endpoint_of(address, "--kv-peers", token)
            check_listener(found, timeout_s)
            endpoint.set_result(found)
        except Exception as error:  # raised again where the endpoint is needed
            endpoint.set_exception(error)

    threading.Thread(target=run, name="kv-resolve", daemon=True).start()
    return endpoint
