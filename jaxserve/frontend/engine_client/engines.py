"""The engines of one server: a connection per replica, which may come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from jaxserve.errors import UnavailableError
from jaxserve.frontend.engine_client.connection import LOADING, EngineConnection
from jaxserve.ipc.messages import (
    STOPPED,
    CommandName,
    CommandOptions,
    EngineState,
    ModelInfo,
    PagesChanged,
    StartupProgress,
)
from jaxserve.routing.pages import HeldPages
from jaxserve.types import BlockHash


class Engines:
    """The current connections of `num_replicas` replicas."""

    def __init__(self, num_replicas: int, on_progress: Callable[[StartupProgress], None]) -> None:
        self._num_replicas = num_replicas
        self._on_progress = on_progress
        self._started_replicas: set[int] = set()
        self._lost_replicas: set[int] = set()
        self.connections: dict[int, EngineConnection] = {}
        """By replica; one without an engine has none."""
        self.pages: dict[int, HeldPages] = {}
        """Pages of each replica's prefix cache, if engines publish them."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called when an engine becomes ready."""
        self.end_waiting: Callable[[str], None] = lambda message: None
        """Ends the requests that wait for an engine."""
        self.first_started = asyncio.Event()
        """Set once an engine is ready, or no engine will be."""
        self.all_started = asyncio.Event()
        """Set once every replica has been ready, or no engine will be."""

    def note_pages(self, replica: int, pages: PagesChanged) -> None:
        """Record which pages a replica's prefix cache has gained and lost."""
        held = self.pages.setdefault(replica, HeldPages())
        held.change(map(BlockHash, pages.added), map(BlockHash, pages.removed))

    def note_progress(self, progress: StartupProgress) -> None:
        """Report a phase of the start, of an engine or of this process. Replicas that start later are not shown."""
        if not self._started_replicas or self._num_replicas == 1:
            self._on_progress(progress)

    def note_ready(self, replica: int) -> None:
        """Record that the engine of this replica is ready."""
        self._started_replicas.add(replica)
        self.first_started.set()
        if len(self._started_replicas) == self._num_replicas:
            self.all_started.set()
        self.on_ready()

    def lose(self, replica: int) -> bool:
        """Expect no further engine of this replica. Return True if that was the last one."""
        self._lost_replicas.add(replica)
        return len(self._lost_replicas) == self._num_replicas

    def ready(self) -> dict[int, EngineConnection]:
        """Return the connections whose engines accept requests, by replica."""
        return {replica: link for replica, link in self.connections.items() if link.is_ready}

    def models(self) -> list[ModelInfo]:
        """Return the model of each engine that accepts requests."""
        return [link.model_info for link in self.ready().values() if link.model_info is not None]

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of requests that have no output yet."""
        return sum(connection.waiting.num_tokens for connection in self.connections.values())

    def require_one(self) -> EngineConnection:
        """Return the connection of an engine, ready if there is one. Raises UnavailableError if there is none."""
        for connection in (*self.ready().values(), *self.connections.values()):
            return connection
        raise UnavailableError(LOADING)

    def ailment(self) -> str | None:
        """Return the reason why no engine is healthy; None if one is healthy or loads, or if there is none."""
        ailments = [connection.ailment() for connection in self.connections.values()]
        return None if None in ailments else next(iter(ailments), None)

    async def command(self, name: CommandName, options: CommandOptions) -> list[EngineState]:
        """Run a command of the operator in every ready engine. Raises RequestError if one rejects it."""
        return await asyncio.gather(*(connection.command(name, options) for connection in self.ready().values()))

    def abort_all(self, message: str) -> None:
        """End every running request with an UnavailableError."""
        for connection in self.connections.values():
            connection.abort_all(message)
        self.end_waiting(message)

    def end(self, reason: str) -> None:
        """End all connections: no engine will follow."""
        self.first_started.set()
        self.all_started.set()
        for connection in list(self.connections.values()):
            connection.end(reason)
        self.end_waiting(STOPPED)
