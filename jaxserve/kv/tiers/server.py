"""Serves the pages of this engine's stores to other engines."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import zmq

from jaxserve.errors import ConfigError
from jaxserve.kv.tiers.page import PageLayout
from jaxserve.kv.tiers.store import OwnStore, leading_tiers
from jaxserve.kv.tiers.wire import (
    CURVE_BYTES,
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    PageRefusal,
    PageReply,
    PageRequest,
    WireError,
    header_of,
    open_request,
    secure_server,
)
from jaxserve.types import BlockHash

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.1
_SHORT_POLL_S: Final = 0.002
"""The poll while a request waits for a page."""
_LONGEST_WAIT_S: Final = 30.0
_MAX_REPLIES: Final = 4
"""Replies that wait for a client that does not read; further ones are dropped, and it computes its prompt."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request for a page that is on its way from the device."""

    client: bytes
    request: PageRequest
    deadline_s: float


class PageServer:
    """One thread that answers requests for pages."""

    def __init__(
        self,
        layout: PageLayout,
        stores: Sequence[OwnStore],
        is_coming: Callable[[BlockHash], bool],
        endpoint: str,
        token: str,
    ) -> None:
        """`is_coming`: True for a page or snapshot that will soon be in the stores. Raises ConfigError for an address in use."""
        self._layout = layout
        self._stores = stores
        self._is_coming = is_coming
        self._waiting: list[_Waiting] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES + CURVE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_REPLIES)
        secure_server(self._socket, token)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise ConfigError(
                f"--kv-listen {endpoint.removeprefix('tcp://')}: {os.strerror(error.errno or 0)}"
            ) from error
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kv-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()
        self._context.term()

    def _serve(self) -> None:
        while not self._stop.is_set():
            try:
                if self._socket.poll(int(1000 * (_SHORT_POLL_S if self._waiting else _POLL_S))):
                    self._receive()
                waiting, self._waiting = self._waiting, []
                for entry in waiting:
                    self._answer(entry)
            except Exception:  # a damaged store or a bug: the client computes its prompt
                _log.exception("a request for KV pages failed")

    def _receive(self) -> None:
        client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        try:
            request = open_request(frames)
        except WireError as error:
            _log.warning("ignored a request for KV pages: %s", error)
            return
        if request.identity != self._layout.identity:
            self._socket.send_multipart([client, header_of(PageRefusal(request.nonce))])
            return
        self._answer(_Waiting(client, request, time.monotonic() + min(request.wait_s, _LONGEST_WAIT_S)))

    def _answer(self, entry: _Waiting) -> None:
        """Reply, or keep the request while its next page is on its way."""
        request, names = entry.request, entry.request.hashes
        may_wait = time.monotonic() < entry.deadline_s
        if request.finds_first:
            indices = (i for i, name in enumerate(names) if self._has(name) or (may_wait and self._is_coming(name)))
            count = next(indices, len(names))
        else:
            count = len(leading_tiers(self._stores, names))
        if may_wait and count < len(names) and not self._has(names[count]) and self._is_coming(names[count]):
            self._waiting.append(entry)
            return
        if not request.max_pages:  # asked first, about a whole prefix: its end is evicted before its start
            found = names[count : count + 1] if request.finds_first else names[:count][::-1]
            for store in self._stores:
                store.touch(found)
        rows = list[np.ndarray]()
        for name in names[: min(count, request.max_pages)]:
            layout = self._layout.of(name)
            row = np.empty(layout.num_bytes, np.uint8)
            if rows and sum(map(len, rows)) + len(row) > MAX_REPLY_BYTES:
                break
            if not any(store.get([name], [layout.views(row)]) for store in self._stores):
                break  # evicted since it was counted
            rows.append(row)
        header = header_of(PageReply(request.nonce, count))
        self._socket.send_multipart([entry.client, header, *(row.data for row in rows)], copy=False)

    def _has(self, name: BlockHash) -> bool:
        return any(store.num_leading([name]) for store in self._stores)
