"""The additional API processes of `--api-processes`: the first one starts, watches and ends them.

Each is `python -m jaxserve.runtime.api_workers LISTENER ...`:

arguments descriptors of its listening sockets
stdin     one line, an ApiWorkerSpec; then one Order per line; end of file if the parent process died: the worker exits
stdout    one line when it accepts requests, and one when it is suspended
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from jaxserve.config import Config
from jaxserve.errors import StartupError
from jaxserve.ipc.address import replica_address
from jaxserve.log import configure_logging
from jaxserve.runtime.api_process import ABORT_FLUSH_S, DEATH_GRACE_S, ApiProcess, install, serving_api, tokenizer_of
from jaxserve.runtime.departure import Departure
from jaxserve.runtime.tasks import StopSignals, first_of, in_thread, running

_log = logging.getLogger(__name__)

READY_LINE: Final = b"ready\n"
SUSPENDED_LINE: Final = b"suspended\n"
STOP_GRACE_S: Final = 3.0
"""Time that a process may take beyond its drain time before it is killed."""


class ApiWorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that an additional API process needs to start."""

    config: Config
    model_path: str
    address: str
    """Address of the first engine of the first replica."""
    index: int
    """Number of the process; the parent is 0."""
    is_successor: bool = False
    """True: accept no connection before the order Accept."""

    def to_line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


class NextEngine(msgspec.Struct, frozen=True, tag_field="order", tag="next_engine"):
    """Order after the end of an engine: end its requests, and connect to the replica's next one."""

    replica: int
    address: str | None
    """None: the replica gets no further engine."""


class Stop(msgspec.Struct, frozen=True, tag_field="order", tag="stop"):
    """Order at the end of the server: end all requests with an error, and exit."""

    reason: str


class Accept(msgspec.Struct, frozen=True, tag_field="order", tag="accept"):
    """Order to accept connections, after the start in place of another server or after Suspend."""


class Suspend(msgspec.Struct, frozen=True, tag_field="order", tag="suspend"):
    """Order to accept no connection, finish all requests and report it."""


class Leave(msgspec.Struct, frozen=True, tag_field="order", tag="leave"):
    """Order to finish all requests and exit, since another server has the port."""

    receiver: str
    """Unix socket that takes idle connections."""


Order: TypeAlias = NextEngine | Stop | Accept | Suspend | Leave
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

    async def accept(self) -> None:
        """Order all to accept connections."""
        await self._send(Accept())

    async def suspend(self) -> None:
        """Order all to stop serving, and wait until they have finished what has begun."""
        await self._send(Suspend())
        for process in self._processes:
            assert process.stdout is not None, "stdout is a pipe"
            await process.stdout.readline()  # nothing if it died: `wait_one_ended` reports it

    async def leave(self, receivers: Sequence[str], timeout_s: float) -> None:
        """Order all to exit when their requests have ended, within `timeout_s`, and to send idle connections to `receivers`."""
        self._stop_timeout_s = timeout_s + ABORT_FLUSH_S + STOP_GRACE_S
        for index, process in enumerate(self._processes, start=1):
            await self._send(Leave(receivers[index % len(receivers)]), [process])

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

    async def switch_engine(self, replica: int, address: str | None) -> None:
        """Order all to end the requests of the dead engine and to connect to the replica's next one, if any, at `address`."""
        await self._send(NextEngine(replica, address))

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

    async def _send(self, order: Order, processes: Sequence[asyncio.subprocess.Process] | None = None) -> None:
        line = msgspec.json.encode(order) + b"\n"
        for process in self._processes if processes is None else processes:
            assert process.stdin is not None, "stdin is a pipe"
            with contextlib.suppress(ConnectionError):  # it is dead: `wait_one_ended` reports it
                process.stdin.write(line)
                await process.stdin.drain()


@contextlib.asynccontextmanager
async def api_workers(
    config: Config,
    model_path: Path,
    address: str,
    listeners: Sequence[Sequence[socket.socket]],
    *,
    is_successor: bool = False,
) -> AsyncIterator[ApiWorkers]:
    """Start one additional API process for each entry of `listeners`; they have ended after the block."""
    processes: list[asyncio.subprocess.Process] = []
    workers = ApiWorkers(processes, config.server.shutdown_timeout + ABORT_FLUSH_S)
    try:
        for index, own in enumerate(listeners, start=1):
            spec = ApiWorkerSpec(
                config=config, model_path=str(model_path), address=address, index=index, is_successor=is_successor
            )
            processes.append(await _start(spec, own))
        yield workers
    finally:
        await workers.wait_ended()


async def _start(spec: ApiWorkerSpec, listeners: Sequence[socket.socket]) -> asyncio.subprocess.Process:
    """Start a process in a separate session: a Ctrl-C in the terminal reaches this process only, which then decides."""
    descriptors = [listener.fileno() for listener in listeners]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "jaxserve.runtime.api_workers",
        *map(str, descriptors),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        pass_fds=descriptors,
        start_new_session=True,
    )
    assert process.stdin is not None, "stdin is a pipe"
    with contextlib.suppress(ConnectionError):  # it died at once: `wait_ready` reports it
        process.stdin.write(spec.to_line())
        await process.stdin.drain()
    return process


async def serve(listeners: Sequence[socket.socket]) -> int:
    """Run one API process; returns the exit code."""
    async with _stdin() as orders:
        spec = msgspec.json.decode(await orders.readline(), type=ApiWorkerSpec)
        configure_logging(spec.config.server.log_level, spec.config.server.log_format)
        stop = StopSignals()
        with stop.caught():
            tokenizer = await in_thread(lambda: tokenizer_of(spec.config, Path(spec.model_path)))
            async with serving_api(
                spec.config, spec.address, listeners, spec.index, is_successor=spec.is_successor
            ) as api:
                install(api.frontend, spec.config, tokenizer, Path(spec.model_path))
                return await _serve_until_end(api, spec.address, orders, stop)


async def _serve_until_end(api: ApiProcess, address: str, orders: asyncio.StreamReader, stop: StopSignals) -> int:
    worker = _Worker(api, Departure(api))
    async with (
        running(worker.follow_orders(address, orders)) as engine_end,
        running(worker.left.wait()) as left,
        running(_announce(api)),
    ):
        await first_of(stop.first.wait(), asyncio.wait({engine_end, left}, return_when=asyncio.FIRST_COMPLETED))
        if left.done():
            return 0
        if not engine_end.done():
            await api.drain(stop.second, asyncio.wait({engine_end}))
            return 0
        await api.fail(engine_end.result(), stop.first)
        return 1


@dataclass(slots=True)
class _Worker:
    """One additional API process, as its parent orders it."""

    api: ApiProcess
    departure: Departure
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its requests have ended, and another server has the port."""

    async def follow_orders(self, address: str, orders: asyncio.StreamReader) -> str:
        """Connect to one engine of each replica after the other, as ordered; returns why there is none any more."""
        addresses = [replica_address(address, replica) for replica in range(self.api.config.parallel.replicas)]
        nexts: list[asyncio.Queue[str | None]] = [asyncio.Queue() for _ in addresses]
        async with contextlib.AsyncExitStack() as tasks:
            for replica, first in enumerate(addresses):
                await tasks.enter_async_context(running(_follow_replica(self.api, replica, first, nexts[replica])))
            while not isinstance(order := await _next_order(orders), Stop):
                if isinstance(order, NextEngine):
                    nexts[order.replica].put_nowait(order.address)
                else:  # beside the next orders: the engine may die while requests finish
                    await tasks.enter_async_context(running(self._change(order)))
            self.api.client.fail(order.reason)  # before connections end: requests would wait for the next engine
            return order.reason

    async def _change(self, order: Accept | Suspend | Leave) -> None:
        if isinstance(order, Accept):
            await self.departure.resume()
        elif isinstance(order, Suspend):
            await self.departure.suspend()
            sys.stdout.buffer.write(SUSPENDED_LINE)
            sys.stdout.flush()
        else:
            await self.departure.leave(order.receiver)
            self.left.set()


async def _next_order(orders: asyncio.StreamReader) -> Order:
    line = await orders.readline()
    if not line:  # the parent died
        os._exit(1)
    return _ORDER.decode(line)


async def _follow_replica(api: ApiProcess, replica: int, address: str, nexts: asyncio.Queue[str | None]) -> None:
    """Connect to one engine of a replica after the other."""
    following: str | None = address
    while following is not None:
        async with api.connected(following, replica):
            following = await nexts.get()
            if following is None:
                api.client.give_up(replica, "the engine stopped")


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
    """Run on the listening sockets whose descriptors are the arguments."""
    with contextlib.ExitStack() as sockets:
        listeners = [sockets.enter_context(socket.socket(fileno=int(word))) for word in sys.argv[1:]]
        try:
            return asyncio.run(serve(listeners))
        except StartupError as error:
            _log.error("%s", error)
            return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
