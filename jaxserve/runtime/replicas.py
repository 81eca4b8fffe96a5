"""Runs the engines of all replicas of one model.

The first replica starts alone, and the others once it is ready: they find in the compile cache what it has compiled by then. The server
answers as soon as the first one is ready. An engine that dies is restarted while the others serve; when it has died too
often, the server goes on without it, and ends with the last one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.config.recorder import DEFAULT_FLIGHT_DIRECTORY
from jaxserve.ipc.address import replica_address
from jaxserve.ipc.engine_spec import EngineSpec
from jaxserve.runtime.devices import ReplicaDevices
from jaxserve.runtime.engine_supervisor import EngineSupervisor
from jaxserve.runtime.models.model_runtime import ModelRuntime
from jaxserve.runtime.spawn import Spawned

_log = logging.getLogger(__name__)

NextEngine = Callable[[int, str | None], Awaitable[None]]
"""Called with a replica and the address of its next engine, or None if it gets no further one."""


def spec_of(spec: EngineSpec, replica: int) -> EngineSpec:
    """Return what an engine process of this replica needs, from what all of them have in common."""

    def own(folder: str | None) -> str | None:
        return folder and str(Path(folder, f"replica-{replica}"))

    server, recorder = spec.config.server, spec.config.recorder
    records = recorder.flight_recorder_dir or DEFAULT_FLIGHT_DIRECTORY
    config = dataclasses.replace(
        spec.config,
        tiers=spec.config.tiers.for_replica(replica),
        server=dataclasses.replace(server, profile_dir=own(server.profile_dir)),
        recorder=dataclasses.replace(recorder, flight_recorder_dir=own(records)),
    )
    return msgspec.structs.replace(
        spec, config=config, address=replica_address(spec.address, replica), publishes_pages=True
    )


class ReplicaSupervisors:
    """One supervisor for each replica."""

    def __init__(
        self,
        model: ModelRuntime,
        spec: EngineSpec,
        process: Spawned | None,
        on_next: NextEngine,
        devices: Sequence[ReplicaDevices],
    ) -> None:
        """spec, process: of the first engine of the first replica. devices: of each replica."""
        self._model = model
        self._supervisors = [
            EngineSupervisor(
                model,
                spec if len(devices) == 1 else spec_of(spec, replica),
                None if replica else process,
                on_next,
                replica,
                own,
            )
            for replica, own in enumerate(devices)
        ]
        self._running: dict[asyncio.Task[str], EngineSupervisor] = {}

    def allow_restarts(self) -> None:
        """Restart engines that die from now on. Before this call the end of an engine is a failed start."""
        for supervisor in self._supervisors:
            supervisor.allow_restarts()

    async def suspend(self) -> None:
        """End all engines, and start none until `resume`. Returns when they have ended."""
        await asyncio.gather(*(supervisor.suspend() for supervisor in self._running.values()))

    async def resume(self) -> None:
        """Start the engines after `suspend`; returns when all are ready or given up."""
        await asyncio.gather(*(supervisor.resume() for supervisor in self._running.values()))

    async def run(self) -> str:
        """Keep the engines running; returns why the last one is gone. Raises StartupError if one cannot start."""
        started = asyncio.create_task(self._model.client.engines.first_started.wait())
        try:
            await asyncio.wait({self._start(self._supervisors[0]), started}, return_when=asyncio.FIRST_COMPLETED)
            for supervisor in self._supervisors[1:]:
                self._start(supervisor)
            while True:
                done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                reasons = [task.result() for task in done]
                for task in done:
                    del self._running[task]
                if not self._running:
                    return reasons[-1]
                _log.error("%d of %d replicas are left", len(self._running), len(self._supervisors))
        finally:
            tasks: list[asyncio.Task[Any]] = [started, *self._running]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, supervisor: EngineSupervisor) -> asyncio.Task[str]:
        task = asyncio.create_task(supervisor.run())
        self._running[task] = supervisor
        return task
