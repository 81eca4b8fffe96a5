"""A server gives its port to another process: all of its processes stop serving, and serve again if the other one fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve.runtime.api_workers import ApiWorkers
from jaxserve.runtime.departure import Departure
from jaxserve.runtime.handover import HandOver
from jaxserve.runtime.models.model_supervisors import ModelSupervisors
from jaxserve.runtime.tasks import running

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Replacement:
    """The processes of one server that is ready."""

    departure: Departure
    """The departure of this API process."""
    workers: ApiWorkers
    supervisors: ModelSupervisors
    timeout_s: float
    """Time that the requests of an API process may take once another server has the port."""
    num_hosts: int
    """Hosts of the engine. Processes on other hosts are not replaced, so a server over several hosts keeps its port."""

    @contextlib.asynccontextmanager
    async def offered(self, listeners: Sequence[socket.socket], folder: Path) -> AsyncIterator[asyncio.Task[None]]:
        """Let another process take the port inside the block.

        Yields a task that ends when another process has the port and the requests of this one have ended. folder: the
        server's private directory.
        """
        hosts = "it spans several hosts: start the new hosts beside it and move the balancer"
        refusal = hosts if self.num_hosts > 1 else None
        hand_over = HandOver(listeners, self._suspend, self._resume, refusal)

        async def leave() -> None:
            receivers = await hand_over.receivers
            await self.workers.leave(receivers, self.timeout_s)
            await self.departure.leave(receivers[0])

        async with hand_over.offering(folder), running(leave()) as left:
            yield left

    async def _suspend(self) -> None:
        """Finish all requests and end the engines; what comes then waits in the kernel's queues."""
        _log.info("finishing requests before the next process starts its engine; new connections wait")
        await asyncio.gather(self.departure.suspend(), self.workers.suspend())
        await self.supervisors.suspend()

    async def _resume(self) -> None:
        await self.supervisors.resume()
        await self.workers.accept()
        await self.departure.resume()
        _log.info("serving again")
