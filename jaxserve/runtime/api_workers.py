"""The additional API processes of `--api-processes`: the first one starts, watches and ends them.

Each is `python -m jaxserve.runtime.api_workers LISTENER`:


argument  the descriptor of its listening socket
stdin     one line, an ApiWorkerSpec; then one order per line: NextEngine if the engine ended and another is started,
          Stop if none will be; end of file if the parent process died: the worker exits
stdout    one line when it accepts requests
SIGTERM   drain and exit 0
SIGINT    while draining: exit at once
exit      0 stopped, 1 ordered to stop or the parent died, 2 could not start
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from jaxserve.config import Config
from jaxserve.errors import StartupError
from jaxserve.log import configure_logging
from jaxserve.runtime.api_process import ABORT_FLUSH_S, DEATH_GRACE_S, ApiProcess, install, serving_api, tokenizer_of
from jaxserve.runtime.tasks import StopSignals, first_of, in_thread, running

_log = logging.getLogger(__name__)

READY_LINE: Final = b"ready\n"
STOP_GRACE_S: Final = 3.0
"""Time that a process may take beyond its drain time before it is killed."""


class ApiWorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that an additional API process needs to start."""

    config: Config
    model_path: str
    address: str
    """Address of the first engine."""
    index: int
    """Number of the process; the parent is 0."""

    def to_line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


class NextEngine(msgspec.Struct, frozen=True, tag_field="order", tag="next_engine"):
    """Order after the end of an engine: end its requests, and connect to the next one."""

    address: str


class Stop(msgspec.Struct, frozen=True, tag_field="order", tag="stop"):
    """Order at the end of the server: end all requests with an error, and exit."""

    reason: str


Order: TypeAlias = NextEngine | Stop
_ORDER: Final[msgspec.json.Decoder[Order]] = msgspec.json.Decoder(Order)


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
        "jaxserve.runtime.api_workers",
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


async def serve(listener: socket.socket) -> int:
    """Run one API process; returns the exit code."""
    async with _stdin() as orders:
        spec = msgspec.json.decode(await orders.readline(), type=ApiWorkerSpec)
        configure_logging(spec.config.server.log_level, spec.config.server.log_format)
        stop = StopSignals()
        with stop.caught():
            tokenizer = await in_thread(lambda: tokenizer_of(spec.config, Path(spec.model_path)))
            async with serving_api(spec.config, spec.address, listener, spec.index) as api:
                install(api.frontend, spec.config, tokenizer, Path(spec.model_path))
                return await _serve_until_end(api, spec.address, orders, stop)


async def _serve_until_end(api: ApiProcess, address: str, orders: asyncio.StreamReader, stop: StopSignals) -> int:
    async with running(_follow_engines(api, address, orders)) as engine_end, running(_announce(api)):
        await first_of(stop.first.wait(), asyncio.wait({engine_end}))
        if not engine_end.done():
            await api.drain(stop.second, asyncio.wait({engine_end}))
            return 0
        await api.fail(engine_end.result(), stop.first)
        return 1


async def _follow_engines(api: ApiProcess, address: str, orders: asyncio.StreamReader) -> str:
    """Connect to one engine after the other, as ordered; returns why there is none any more."""
    while True:
        async with api.connected(address):
            line = await orders.readline()
            if not line:  # the parent died
                os._exit(1)
            order = _ORDER.decode(line)
            if isinstance(order, Stop):
                api.client.fail(order.reason)  # inside the block: after it, requests would wait for the next engine
                return order.reason
        address = order.address


async def _announce(api: ApiProcess) -> None:
    await api.client.wait_started()
    sys.stdout.buffer.write(READY_LINE)
    sys.stdout.flush()


@contextlib.asynccontextmanager
async def _stdin() -> AsyncIterator[asyncio.StreamReader]:
    reader = asyncio.StreamReader(limit=1 << 20)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    try:
        yield reader
    finally:
        transport.close()


def main() -> int:
    """Run on the listening socket whose descriptor is the first argument."""
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        try:
            return asyncio.run(serve(listener))
        except StartupError as error:
            _log.error("%s", error)
            return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
