"""The API process's side of the engine: the current connection, and whether requests are accepted.

Engines may be restarted; the client stays, with the places in the queue and the final decisions: that the server
drains, or that no engine will follow. Between two engines the client reports loading, as before the first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from jaxserve.errors import StartupError, UnavailableError
from jaxserve.frontend.engine_client.connection import LOADING, Admission, EngineConnection, Socket
from jaxserve.frontend.engine_client.output_stream import OutputStream
from jaxserve.frontend.peers import PeerProcesses
from jaxserve.ipc.messages import AddRequest, CommandName, ModelInfo, StartupProgress
from jaxserve.metrics import Metrics


class EngineClient:
    """Submits requests and commands to the engine, whichever one runs."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        max_queued_requests: int,
        max_queued_tokens: int | None = None,
        stall_timeout_s: float,
        peers: PeerProcesses,
        on_progress: Callable[[StartupProgress], None] = lambda progress: None,
    ) -> None:
        self._metrics = metrics
        self._max_waiting_tokens = None if max_queued_tokens is None else peers.share_of(max_queued_tokens)
        self._stall_timeout_s = stall_timeout_s
        self.note_progress = on_progress
        """Called with every phase of the start; the phases of this process are reported through it as well."""
        self.admission = Admission(
            metrics, lambda: peers.share_of(self.require_ready().max_num_seqs + max_queued_requests)
        )
        self._connection: EngineConnection | None = None
        self._started = asyncio.Event()
        self._failure: str | None = None
        self._is_draining = False

    @contextlib.asynccontextmanager
    async def connected(self, socket: Socket) -> AsyncIterator[EngineConnection]:
        """Send requests to the engine at `socket` inside the block; running requests end with an error after it."""
        connection = self._connection = EngineConnection(
            socket,
            self._metrics,
            max_waiting_tokens=self._max_waiting_tokens,
            stall_timeout_s=self._stall_timeout_s,
            on_progress=self.note_progress,
            on_ready=self._started.set,
        )
        run = asyncio.create_task(connection.run())
        try:
            yield connection
        finally:
            connection.end()
            self._connection = None
            self._metrics.forget_engine()
            run.cancel()
            await asyncio.wait({run})

    @property
    def model_info(self) -> ModelInfo | None:
        """The model of the engine that accepts requests; None while there is none."""
        return self._connection.model_info if self._connection is not None and self._connection.is_ready else None

    @property
    def is_ready(self) -> bool:
        """True if new requests are accepted."""
        return self.model_info is not None and self._failure is None and not self._is_draining

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def ailment(self) -> str | None:
        """Return the reason why the engine is not healthy; None if it is, or if there is none yet."""
        if self._failure is not None:
            return self._failure
        return None if self._connection is None else self._connection.ailment()

    async def wait_started(self) -> ModelInfo:
        """Wait until the first engine is ready. Raises StartupError if it is given up before."""
        await self._started.wait()
        if self.model_info is None:
            raise StartupError(self._failure or "the engine did not start")
        return self.model_info

    def require_ready(self) -> ModelInfo:
        """Return the model's info. Raises UnavailableError while the engine loads, drains or is dead."""
        self._require_alive()
        if self._is_draining:
            raise UnavailableError("The server is shutting down.")
        if (model_info := self.model_info) is None:
            raise UnavailableError(LOADING)
        return model_info

    def submit(self, requests: Sequence[AddRequest]) -> OutputStream:
        """Return the outputs of `requests`, which are submitted when it is entered.

        Each request gets exactly one output with a `finish_reason`.
        """
        self._require_alive()
        return OutputStream(self._require_connection(), requests)

    async def command(self, name: CommandName) -> None:
        """Run a command of the operator in the engine. Raises RequestError if the engine rejects it."""
        self.require_ready()
        await self._require_connection().command(name)

    def start_draining(self) -> None:
        """Reject new requests from now on."""
        self._is_draining = True

    def abort_all(self, message: str) -> None:
        """End every running request with an UnavailableError."""
        if self._connection is not None:
            self._connection.abort_all(message)

    def fail(self, reason: str) -> None:
        """Give up on engines: running requests end with an error. Later calls change nothing."""
        if self._failure is not None:
            return
        self._failure = reason
        self._started.set()
        if self._connection is not None:
            self._connection.end(reason)

    def _require_connection(self) -> EngineConnection:
        if self._connection is None:
            raise UnavailableError(LOADING)
        return self._connection

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise UnavailableError("The engine is not running.")
