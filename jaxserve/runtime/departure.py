"""An API process stops accepting connections without losing a request: for good, or until it is needed again."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Coroutine
from typing import Any

from jaxserve.http.sockets.transfer import move_connections, released
from jaxserve.runtime.api_process import ApiProcess

_log = logging.getLogger(__name__)


class Departure:
    """The end of one API process's service while another process has the same listening sockets."""

    def __init__(self, api: ApiProcess) -> None:
        self._api = api
        self._held: list[socket.socket] = []
        """Idle connections that no process reads from."""

    async def suspend(self) -> None:
        """Finish all requests that have begun, and leave everything else unread: in the kernel's queues, and in `_held`."""
        self._api.http.stop_accepting()
        await self._within_timeout(self._hold_all())

    async def resume(self) -> None:
        """Serve again, what was left unread as well."""
        self._api.http.start_accepting()  # first: connections adopted before it would close after one reply
        held, self._held = self._held, []
        for connection in held:
            await self._api.http.adopt(connection)

    async def leave(self, receiver: str) -> None:
        """Finish all requests that have begun, and send idle connections to the process that receives at `receiver`."""
        self._api.http.close_listeners()
        _log.info(
            "another process serves the port; %d connections and %d requests are left here, which may take %g s",
            self._api.http.num_connections,
            self._api.num_sequences,
            self._api.config.server.upgrade_timeout,
        )
        await self._within_timeout(self._move_all(receiver))

    async def _within_timeout(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for `work` and for the end of all requests; those that take longer than `--upgrade-timeout` end with an error."""
        try:
            async with asyncio.timeout(self._api.config.server.upgrade_timeout):
                await work
                await self._api.wait_idle()  # also of responses in the background
        except TimeoutError:
            await self._api.abort_all()

    async def _hold_all(self) -> None:
        async for connections in released(self._api.http):
            self._held += connections

    async def _move_all(self, receiver: str) -> None:
        held, self._held = self._held, []
        try:
            await move_connections(self._api.http, receiver, held)
        except OSError as error:
            _log.warning("idle connections cannot move to the next process: %s", error.strerror or error)
            async for connections in released(self._api.http):
                for connection in connections:
                    connection.close()
