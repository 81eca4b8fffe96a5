"""Keeps an engine running for a server: restarts it when it dies, as often as `--engine-restarts` allows.

Each incarnation of the engine has a process, an address and connections. So no message for one engine reaches the next,
however late an API process learns of the end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from jaxserve.errors import StartupError
from jaxserve.frontend.engine_client.connection import EngineConnection
from jaxserve.ipc.address import incarnation_address
from jaxserve.ipc.engine_spec import EngineSpec
from jaxserve.ipc.messages import ModelInfo
from jaxserve.runtime.devices import ALL_DEVICES, ReplicaDevices
from jaxserve.runtime.engine_process import engine_process, wait_dead, wait_started
from jaxserve.runtime.models.model_runtime import ModelRuntime
from jaxserve.runtime.spawn import Spawned
from jaxserve.runtime.tasks import running

_log = logging.getLogger(__name__)

RESTART_WINDOW_S: Final = 600.0
"""Time in which restarts count: an engine that dies rarely is restarted, one that keeps dying is given up."""
NOT_STARTED: Final = "the engine has not started"
"""Reason that anyone may read at /health: the engine's own words name files, and are in the log."""


class RestartBudget:
    """Restarts that are left within the window."""

    def __init__(self, max_restarts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_restarts = max_restarts
        self._clock = clock
        self._taken: deque[float] = deque()

    def take(self) -> bool:
        """Count one more restart and return True; return False, without counting, if none is left."""
        now_s = self._clock()
        while self._taken and now_s - self._taken[0] >= RESTART_WINDOW_S:
            self._taken.popleft()
        if len(self._taken) >= self._max_restarts:
            return False
        self._taken.append(now_s)
        return True

    def __str__(self) -> str:
        return f"{len(self._taken)} of {self._max_restarts} restarts within {RESTART_WINDOW_S / 60:.0f} minutes"


class EngineSupervisor:
    """Runs the engines of one model, or of one of its replicas, one after the other."""

    def __init__(
        self,
        model: ModelRuntime,
        spec: EngineSpec,
        process: Spawned | None,
        on_next: Callable[[int, str | None], Awaitable[None]],
        replica: int = 0,
        devices: ReplicaDevices = ALL_DEVICES,
    ) -> None:
        """spec, process: of the first engine. devices: of all of them.

        on_next: called with the replica and the address of its next engine, or None if it gets no further one.
        """
        self._model = model
        self._spec = spec
        self._process = process
        self._on_next = on_next
        self._replica = replica
        self._devices = devices
        self._has_peers = spec.config.parallel.replicas > 1
        self._name = model.label + (f"replica {replica}: " if self._has_peers else "")
        self._budget = RestartBudget(spec.config.server.engine_restarts)
        self._may_restart = False
        self._suspended = asyncio.Event()
        """Set while no engine is to run."""
        self._stopped = asyncio.Event()
        self._resumed = asyncio.Event()
        self._running = asyncio.Event()
        self._lost_s: float | None = None
        """Time at which the last engine died; None while the first one runs."""

    def allow_restarts(self) -> None:
        """Restart engines that die from now on; a replica that has been ready is restarted before this call as well.

        Before it, the end of an engine is a failed start.
        """
        self._may_restart = True

    async def suspend(self) -> None:
        """End the engine, and start none until `resume`. Returns when it has ended."""
        self._resumed.clear()
        self._suspended.set()
        await self._stopped.wait()

    async def resume(self) -> None:
        """Start an engine after `suspend`; returns when it is ready or given up."""
        self._stopped.clear()
        self._running.clear()
        self._suspended.clear()
        self._resumed.set()
        await self._running.wait()

    async def run(self) -> str:
        """Keep an engine running; returns why there is none any more, in words without names of files.

        Raises StartupError if the first cannot start.
        """
        spec, process = self._spec, self._process
        for number in itertools.count(1):
            async with self._model.connected(spec.address, self._replica) as connection:
                reason = await self._run_engine(connection, spec, process)
                if self._suspended.is_set():
                    self._stopped.set()
                    await self._resumed.wait()
                elif not self._takes_restart():
                    await self._on_next(self._replica, None)
                    # inside the block: after it, requests would wait for the next engine
                    self._model.client.give_up(self._replica, reason)
                    self._stopped.set()  # `suspend` and `resume` are not to wait for an engine that never comes
                    self._running.set()
                    return reason
                else:
                    _log.error("%s%s; starting it again (%s)", self._name, reason, self._budget)
                    self._model.frontend.metrics.of_engine(self._replica).inc("engine_restarts")
                address = incarnation_address(self._spec.address, number)
                await self._on_next(self._replica, address)
            spec, process = msgspec.structs.replace(self._spec, address=address, phases=[]), None
        raise AssertionError("unreachable")

    async def _run_engine(self, connection: EngineConnection, spec: EngineSpec, process: Spawned | None) -> str:
        """Run one engine and return how it ended. Raises StartupError if the first cannot start."""
        spec = with_cache_of(spec, self._model.client.model_info)
        try:
            async with engine_process(spec, process, self._devices) as engine:
                model_info = await wait_started(connection, engine)
                if self._lost_s is not None:
                    self._model.record_start(model_info, self._replica)
                    _log.info("%sthe engine is back after %.1f s", self._name, time.monotonic() - self._lost_s)
                self._running.set()
                self._may_restart |= self._has_peers  # the server answers while the other replicas still start
                async with running(wait_dead(connection, engine)) as dead, running(self._suspended.wait()) as suspended:
                    await asyncio.wait({dead, suspended}, return_when=asyncio.FIRST_COMPLETED)
                    reason = dead.result() if dead.done() else "the engine has been stopped"
                self._lost_s = time.monotonic()
                return reason
        except StartupError as error:
            if self._lost_s is None:
                if self._name:
                    raise type(error)(f"{self._name}{error}") from error
                raise
            _log.error("%sthe engine has not started: %s", self._name, error)
            return NOT_STARTED

    def _takes_restart(self) -> bool:
        if self._model.client.is_draining or not self._may_restart:
            return False
        if not self._budget.take():
            _log.error("%sthe engine is not started again: %s", self._name, self._budget)
            return False
        return True


def with_cache_of(spec: EngineSpec, peer: ModelInfo | None) -> EngineSpec:
    """Return the specification of a replica on CPUs with the size of the KV cache of a running one, which the first of them has
    measured for all. So they share its memory equally, and have the same programs."""
    config = spec.config
    is_measured = config.cache.kv_cache_memory is None and config.parallel.replicas > 1
    if not is_measured or peer is None or peer.platform != "cpu" or not peer.kv_cache_bytes:
        return spec
    cache = dataclasses.replace(config.cache, kv_cache_memory=peer.kv_cache_bytes)
    return msgspec.structs.replace(spec, config=dataclasses.replace(config, cache=cache))
