"""Starts, watches and ends the additional API processes of `--api-processes`. Runs in the first one."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from jaxserve.config import Config
from jaxserve.errors import StartupError
from jaxserve.runtime.api_process import ABORT_FLUSH_S, DEATH_GRACE_S
from jaxserve.runtime.api_worker import READY_LINE, ApiWorkerSpec, NextEngine, Order, Stop

STOP_GRACE_S: Final = 3.0
"""Time that a process may take beyond its drain time before it is killed."""


class ApiWorkers:
    """The additional API processes. They end when this process ends: their stdin is closed then."""

    def __init__(self, processes: Sequence[asyncio.subprocess.Process], drain_s: float) -> None:
        """drain_s: longest time that draining may take."""
        self._processes = processes
        self._drain_s = drain_s
        self._stop_timeout_s = 0.0
        """Time to wait for their end; 0 until they are ordered to end."""

    async def wait_ready(self) -> None:
        """Wait until all accept requests. Raises StartupError if one ends before that."""
        for number, process in enumerate(self._processes, start=1):
            assert process.stdout is not None, "stdout is a pipe"
            if await process.stdout.readline() != READY_LINE:
                raise StartupError(f"API process {number} ended with exit code {await process.wait()}")

    async def wait_one_ended(self) -> str:
        """Wait until one ends without an order; returns what happened."""
        waits = {asyncio.create_task(process.wait()): n for n, process in enumerate(self._processes, start=1)}
        try:
            if waits:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not waits or self._stop_timeout_s:
                await asyncio.Event().wait()
        finally:
            for wait in waits:
                wait.cancel()
        ended = next(wait for wait in waits if wait.done() and not wait.cancelled())
        return f"API process {waits[ended]} ended with exit code {ended.result()}"

    def terminate(self) -> None:
        """Ask all to drain; the second time, to end at once.

        The second call sends another signal: two pending signals of one kind are delivered as one.
        """
        number = signal.SIGINT if self._stop_timeout_s else signal.SIGTERM
        self._stop_timeout_s = self._drain_s + STOP_GRACE_S
        for process in self._processes:
            if process.returncode is None:
                process.send_signal(number)

    async def switch_engine(self, address: str) -> None:
        """Order all to end the requests of the dead engine and to connect to the next one, at `address`."""
        await self._send(NextEngine(address))

    async def fail(self, reason: str) -> None:
        """Order all to end their requests with an error and to exit."""
        self._stop_timeout_s = DEATH_GRACE_S + STOP_GRACE_S
        await self._send(Stop(reason))

    async def wait_ended(self) -> None:
        """Wait for the end of all, as long as that may take; kill those that are left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._stop_timeout_s):
                for process in self._processes:
                    await process.wait()
        for process in self._processes:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _send(self, order: Order) -> None:
        line = msgspec.json.encode(order) + b"\n"
        for process in self._processes:
            assert process.stdin is not None, "stdin is a pipe"
            with contextlib.suppress(ConnectionError):  # it is dead: `wait_one_ended` reports it
                process.stdin.write(line)
                await process.stdin.drain()


@contextlib.asynccontextmanager
async def api_workers(
    config: Config, model_path: Path, address: str, listeners: Sequence[socket.socket]
) -> AsyncIterator[ApiWorkers]:
    """Start one additional API process for each of `listeners`; they have ended after the block."""
    processes: list[asyncio.subprocess.Process] = []
    workers = ApiWorkers(processes, config.server.shutdown_timeout + ABORT_FLUSH_S)
    try:
        for index, listener in enumerate(listeners, start=1):
            spec = ApiWorkerSpec(config=config, model_path=str(model_path), address=address, index=index)
            processes.append(await _start(spec, listener))
        yield workers
    finally:
        await workers.wait_ended()


async def _start(spec: ApiWorkerSpec, listener: socket.socket) -> asyncio.subprocess.Process:
    """Start a process in a separate session: a Ctrl-C in the terminal reaches this process only, which then decides."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "jaxserve.runtime.api_worker",
        str(listener.fileno()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )
    assert process.stdin is not None, "stdin is a pipe"
    with contextlib.suppress(ConnectionError):  # it died at once: `wait_ready` reports it
        process.stdin.write(spec.to_line())
        await process.stdin.drain()
    return process
