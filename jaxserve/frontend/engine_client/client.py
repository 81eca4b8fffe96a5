"""The API process's side of the engine: the current connection, and whether requests are accepted.

Engines may be restarted; the client stays, with the places in the queue and the final decisions: that the server
drains, or that no engine will follow. Between two engines the client reports loading, as before the first. With several
replicas it is ready while one of them is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from types import MappingProxyType

from jaxserve.errors import StartupError, UnavailableError
from jaxserve.frontend.adapters import AdapterNames
from jaxserve.frontend.engine_client.admission import Admission
from jaxserve.frontend.engine_client.connection import LOADING, EngineConnection, Socket
from jaxserve.frontend.engine_client.engines import Engines
from jaxserve.frontend.engine_client.output_stream import OutputStream, PromptPages
from jaxserve.frontend.engine_client.requeue import RequeuedRequests
from jaxserve.frontend.engine_client.routed_requests import RoutedRequests
from jaxserve.frontend.peers import PeerProcesses
from jaxserve.ipc.messages import AddRequest, CommandName, CommandOptions, EngineState, ModelInfo, StartupProgress
from jaxserve.metrics import Metrics
from jaxserve.routing.pages import HeldPages
from jaxserve.routing.policy import LeastTokens, RoutingPolicy
from jaxserve.routing.router import Router


class EngineClient:
    """Submits requests and commands to the engine, whichever one runs, or to the engines of several replicas."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        max_queued_requests: int,
        max_queued_tokens: int | None = None,
        stall_timeout_s: float,
        startup_timeout_s: float = 0.0,
        peers: PeerProcesses,
        on_progress: Callable[[StartupProgress], None] = lambda progress: None,
        num_replicas: int = 1,
        policy: RoutingPolicy | None = None,
        adapters: AdapterNames | None = None,
    ) -> None:
        """policy: chooses among several replicas; None: their outstanding tokens decide. adapters: gets the adapters that
        an engine reports."""
        self._adapters = AdapterNames() if adapters is None else adapters
        self._metrics = [metrics.of_engine(replica) for replica in range(num_replicas)]
        self._max_waiting_tokens = None if max_queued_tokens is None else peers.share_of(max_queued_tokens)
        self._timeouts = {"stall_timeout_s": stall_timeout_s, "startup_timeout_s": startup_timeout_s}

        def max_sequences(model_info: ModelInfo) -> int:
            # Not a share: connections may be distributed unevenly. The engine refuses what is too much for all processes.
            return model_info.max_num_seqs + max_queued_requests

        self.admission = Admission(metrics, lambda: sum(map(max_sequences, self._require_models())))
        self.engines = Engines(num_replicas, on_progress)
        self._ledger: RoutedRequests | RequeuedRequests
        if num_replicas == 1:
            self._ledger = RequeuedRequests(self.engines.require_one, metrics)
            self.engines.on_ready, self.engines.end_waiting = self._ledger.resubmit, self._ledger.end_waiting
        else:
            self._ledger = RoutedRequests(self.engines, Router(policy or LeastTokens()), metrics, max_sequences)
        self.hashes_pages = num_replicas > 1
        """True if requests are routed by the pages of their prompts."""
        self.failure: str | None = None
        """The reason why no engine will follow; None if one runs, or may."""
        self._is_draining = False

    @contextlib.asynccontextmanager
    async def connected(self, socket: Socket, replica: int = 0) -> AsyncIterator[EngineConnection]:
        """Send requests to the engine at `socket` inside the block.

        After it, running requests end with an error; those without output wait for the next engine, once.
        """
        ledger = self._ledger
        connection = self.engines.connections[replica] = EngineConnection(
            socket,
            self._metrics[replica],
            max_waiting_tokens=self._max_waiting_tokens,
            **self._timeouts,
            on_progress=self.engines.note_progress,
            on_ready=partial(self.engines.note_ready, replica),
            on_pages=partial(self.engines.note_pages, replica),
            on_adapters=lambda changed: self._adapters.replace(changed.adapters),
            ledger=ledger,
        )
        self.engines.pages[replica] = HeldPages()
        if isinstance(ledger, RoutedRequests):
            ledger.begin(replica)
        run = asyncio.create_task(connection.run())
        try:
            yield connection
        finally:
            connection.end()
            del self.engines.connections[replica]
            self._metrics[replica].forget_engine()
            run.cancel()
            await asyncio.wait({run})

    @property
    def model_info(self) -> ModelInfo | None:
        """The model of an engine that accepts requests; None while there is none."""
        return next(iter(self.engines.models()), None)

    @property
    def is_ready(self) -> bool:
        """True if new requests are accepted."""
        return self.model_info is not None and self.failure is None and not self._is_draining

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def ailment(self) -> str | None:
        """Return the reason why no engine is healthy; None if one is, or if there is none yet."""
        return self.failure or self.engines.ailment()

    async def wait_started(self) -> ModelInfo:
        """Wait until the first engine is ready. Raises StartupError if it is given up before."""
        await self.engines.first_started.wait()
        if (model_info := self.model_info) is None:
            raise StartupError(self.failure or "the engine did not start")
        return model_info

    def require_ready(self) -> ModelInfo:
        """Return the model's info. Raises UnavailableError while the engine loads, drains or is dead."""
        return self._require_models()[0]

    def submit(self, requests: Sequence[AddRequest], pages: PromptPages = MappingProxyType({})) -> OutputStream:
        """Return the outputs of `requests`, which are submitted when it is entered.

        pages: of prompts that were hashed before; those of others are hashed here if `hashes_pages`. Each request gets exactly one output with a `finish_reason`.
        """
        self._require_alive()
        self.engines.require_one()
        return OutputStream(self._ledger, requests, pages)

    async def command(self, name: CommandName, options: CommandOptions | None = None) -> EngineState:
        """Run a command of the operator in every engine; returns the state of the first. Raises RequestError if one
        rejects it."""
        self.require_ready()
        states = await self.engines.command(name, options or CommandOptions())
        return states[0]

    def start_draining(self) -> None:
        """Reject new requests from now on."""
        self._is_draining = True

    def give_up(self, replica: int, reason: str) -> None:
        """Expect no further engine of this replica. Without any replica left, running requests end with an error."""
        if self.engines.lose(replica):
            self.fail(reason)

    def fail(self, reason: str) -> None:
        """Give up on engines: running requests end with an error. Later calls change nothing."""
        if self.failure is not None:
            return
        self.failure = reason
        self._ledger.close()
        self.engines.end(reason)

    def _require_models(self) -> list[ModelInfo]:
        self._require_alive()
        if self._is_draining:
            raise UnavailableError("The server is shutting down.")
        if not (models := self.engines.models()):
            raise UnavailableError(LOADING)
        return models

    def _require_alive(self) -> None:
        if self.failure is not None:
            raise UnavailableError("The engine is not running.")
