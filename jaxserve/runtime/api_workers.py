"""The additional API processes of `--api-processes`: the first one starts, watches and ends them.

Each is `python -m jaxserve.runtime.api_workers LISTENER ...`:

arguments descriptors of its listening sockets
stdin     one line, an ApiWorkerSpec; then one Order per line; end of file if the parent process died: the worker exits
stdout    one line when it accepts requests, one when it is suspended, and one every second as a sign of life
SIGTERM   drain and exit 0; a SIGINT meanwhile: exit at once
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
from typing import Final

import msgspec

from jaxserve.config import Config
from jaxserve.errors import StartupError
from jaxserve.http.event_loop import run_measured
from jaxserve.ipc.address import replica_address
from jaxserve.log import configure_logging
from jaxserve.runtime.api_process import ABORT_FLUSH_S, DEATH_GRACE_S, ApiProcess, serving_api
from jaxserve.runtime.api_worker import (
    ALIVE_LINE,
    ALIVE_S,
    READY_LINE,
    SUSPENDED_LINE,
    Accept,
    ApiWorker,
    Leave,
    NextEngine,
    Order,
    Stop,
    Suspend,
)
from jaxserve.runtime.departure import Departure
from jaxserve.runtime.engine_supervisor import RestartBudget
from jaxserve.runtime.models.model_runtime import install, tokenizer_of
from jaxserve.runtime.tasks import StopSignals, first_of, in_thread, running

_log = logging.getLogger(__name__)

ACCEPT_S: Final = 10.0
"""Longest time that a process which follows a dead one, once it has started, leaves connections in the queue while there
is no engine."""
STOP_GRACE_S: Final = 3.0
"""Time that a process may take beyond its drain time. Then it is killed unless it gives signs of life: it still sends errors."""


class ApiWorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that an additional API process needs to start."""

    config: Config
    model_path: str
    address: str
    """Address of the first engine of the first replica: the sockets between API processes are beside it."""
    engines: list[str | None]
    """Address of the current engine of each replica; None: the replica gets no further one."""
    index: int
    """Number of the process; the parent is 0."""
    is_successor: bool = False
    """True: accept no connection before the order Accept, and take idle ones of the process that serves until then."""
    is_replacement: bool = False
    """True: accept no connection before the order Accept; the process that served before is dead."""

    def to_line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


_ORDER: Final[msgspec.json.Decoder[Order]] = msgspec.json.Decoder(Order)


class ApiWorkers:
    """The additional API processes. One that dies or freezes is replaced, unless it was ordered to end."""

    def __init__(
        self, config: Config, model_path: Path, address: str, listeners: Sequence[Sequence[socket.socket]]
    ) -> None:
        """address: of the first engine of the first replica. listeners: the sockets of each process."""
        self._config = config
        self._model_path = model_path
        self._listeners = listeners
        replicas = range(config.parallel.replicas)
        self._addresses: list[str | None] = [replica_address(address, replica) for replica in replicas]
        """The address of the current engine of each replica."""
        self._address = address
        self._workers: list[ApiWorker] = []
        self._budget = RestartBudget(config.server.engine_restarts)
        self._drain_s = config.server.shutdown_timeout + ABORT_FLUSH_S
        self._is_suspended = False
        self._stop_timeout_s = 0.0
        """Time to wait for their end; 0 until they are ordered to end."""

    async def start(self, *, is_successor: bool) -> None:
        """Start all of them."""
        for number in range(1, len(self._listeners) + 1):
            await self._start(number, is_successor=is_successor, is_replacement=False)

    async def wait_ready(self) -> None:
        """Wait until all accept requests. Raises StartupError if one ends before that."""
        for number, worker in enumerate(self._workers, start=1):
            if not await worker.wait_ready():
                raise StartupError(f"API process {number} {await worker.wait_ended()}")

    async def accept(self) -> None:
        """Order all to accept connections."""
        self._is_suspended = False
        await self._send(Accept())

    async def suspend(self) -> None:
        """Order all to stop serving, and wait until they have finished what has begun."""
        self._is_suspended = True
        for worker in self._workers:
            if not worker.is_silent:
                worker.suspended.clear()
        await self._send(Suspend())
        for worker in self._workers:
            await worker.suspended.wait()  # also set if it died: `supervise` reports it

    async def leave(self, receivers: Sequence[str], timeout_s: float) -> None:
        """Order all to exit when their requests have ended, within `timeout_s`, and to send idle connections to `receivers`."""
        self._stop_timeout_s = timeout_s + ABORT_FLUSH_S + STOP_GRACE_S
        for index, worker in enumerate(self._workers, start=1):
            await worker.send(Leave(receivers[index % len(receivers)]))

    async def supervise(self) -> str:
        """Replace processes that end without an order or freeze; returns why one is not replaced any more.

        Connections that the kernel has queued for such a process wait for the next one: this process has its sockets.
        """
        watches = {asyncio.create_task(self._supervise_one(n)) for n in range(1, len(self._workers) + 1)}
        try:
            if not watches:
                await asyncio.Event().wait()
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for watch in watches:
                watch.cancel()

    def terminate(self) -> None:
        """Ask all to drain; the second time, to end at once.

        The second call sends another signal: two pending signals of one kind are delivered as one.
        """
        number = signal.SIGINT if self._stop_timeout_s else signal.SIGTERM
        self._stop_timeout_s = self._drain_s + STOP_GRACE_S
        for worker in self._workers:
            if not worker.has_ended:
                worker.process.send_signal(number)

    def reload(self) -> None:
        """Let all read the API keys and the certificate again."""
        for worker in self._workers:
            worker.reload()

    async def switch_engine(self, replica: int, address: str | None) -> None:
        """Order all to end the requests of the dead engine and to connect to the replica's next one, if any, at `address`."""
        self._addresses[replica] = address
        await self._send(NextEngine(replica, address))

    async def fail(self, reason: str) -> None:
        """Order all to end their requests with an error and to exit."""
        self._stop_timeout_s = DEATH_GRACE_S + ABORT_FLUSH_S + STOP_GRACE_S
        await self._send(Stop(reason))

    async def wait_ended(self) -> None:
        """Wait for the end of all, as long as that may take, and for those that are slow; kill the others."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._stop_timeout_s):
                for worker in self._workers:
                    await worker.process.wait()
        for worker in self._workers:
            await (worker.wait_lost(STOP_GRACE_S, STOP_GRACE_S) if self._stop_timeout_s else worker.kill())

    async def _supervise_one(self, number: int) -> str:
        server, worker, is_replacement = self._config.server, self._workers[number - 1], False
        while True:
            async with running(worker.wait_lost(server.stall_timeout, server.startup_timeout)) as lost:
                if is_replacement:
                    # Connections wait until it is ready: their requests would get 503.
                    await first_of(worker.wait_ready_or_slow(ACCEPT_S), asyncio.wait({lost}))
                    if not self._is_suspended:  # else `accept` orders it
                        await worker.send(Accept())
                    if self._stop_timeout_s:  # the order to end came meanwhile
                        await worker.kill()
                what = await lost
            if self._stop_timeout_s:
                await asyncio.Event().wait()  # it was ordered to end
            reason = f"API process {number} {what}"
            if self._is_suspended or not self._budget.take():
                return reason
            _log.error("%s; starting it again (%s)", reason, self._budget)
            worker, is_replacement = await self._start(number, is_successor=False, is_replacement=True), True

    async def _start(self, number: int, *, is_successor: bool, is_replacement: bool) -> ApiWorker:
        spec = ApiWorkerSpec(
            config=self._config,
            model_path=str(self._model_path),
            address=self._address,
            engines=list(self._addresses),
            index=number,
            is_successor=is_successor,
            is_replacement=is_replacement,
        )
        worker = await ApiWorker.start("jaxserve.runtime.api_workers", spec.to_line(), self._listeners[number - 1])
        self._workers[number - 1 : number] = [worker]  # at once: orders that come from now on are its, too
        if self._stop_timeout_s:  # the order to end came while the process was started
            await worker.kill()
        for replica, address in enumerate(self._addresses):
            if address != spec.engines[replica]:  # it changed while the process was started
                await worker.send(NextEngine(replica, address))
        return worker

    async def _send(self, order: Order) -> None:
        for worker in self._workers:
            await worker.send(order)


@contextlib.asynccontextmanager
async def running_workers(workers: ApiWorkers, *, is_successor: bool = False) -> AsyncIterator[None]:
    """Start the additional API processes; they have ended after the block."""
    try:
        await workers.start(is_successor=is_successor)
        yield
    finally:
        await workers.wait_ended()


async def serve(listeners: Sequence[socket.socket]) -> int:
    """Run one API process; returns the exit code."""
    async with _stdin() as orders:
        spec = msgspec.json.decode(await orders.readline(), type=ApiWorkerSpec)
        configure_logging(spec.config.server.log_level, spec.config.server.log_format)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to read again
        stop = StopSignals()
        with stop.caught():
            tokenizer = await in_thread(lambda: tokenizer_of(spec.config, Path(spec.model_path)))
            async with serving_api(
                [spec.config],
                spec.address,
                listeners,
                spec.index,
                is_successor=spec.is_successor,
                is_replacement=spec.is_replacement,
            ) as api:
                install(api.first.frontend, spec.config, tokenizer, Path(spec.model_path))
                return await _serve_until_end(api, spec.engines, orders, stop)


async def _serve_until_end(
    api: ApiProcess, engines: Sequence[str | None], orders: asyncio.StreamReader, stop: StopSignals
) -> int:
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, api.reload)
    worker = _Worker(api, Departure(api))
    async with (
        running(worker.follow_orders(engines, orders)) as engine_end,
        running(worker.left.wait()) as left,
        running(_announce(api)),
        running(_live()),
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

    async def follow_orders(self, engines: Sequence[str | None], orders: asyncio.StreamReader) -> str:
        """Connect to one engine of each replica after the other, as ordered; returns why there is none any more."""
        nexts: list[asyncio.Queue[str | None]] = [asyncio.Queue() for _ in engines]
        async with contextlib.AsyncExitStack() as tasks:
            for replica, first in enumerate(engines):
                await tasks.enter_async_context(running(_follow_replica(self.api, replica, first, nexts[replica])))
            while not isinstance(order := await _next_order(orders), Stop):
                if isinstance(order, NextEngine):
                    nexts[order.replica].put_nowait(order.address)
                else:  # beside the next orders: the engine may die while requests finish
                    await tasks.enter_async_context(running(self._change(order)))
            self.api.first.client.fail(order.reason)  # before connections end: requests would wait for the next engine
            return order.reason

    async def _change(self, order: Accept | Suspend | Leave) -> None:
        if isinstance(order, Accept):
            await self.departure.resume()
        elif isinstance(order, Suspend):
            await self.departure.suspend()
            _report(SUSPENDED_LINE)
        else:
            await self.departure.leave(order.receiver)
            self.left.set()


async def _next_order(orders: asyncio.StreamReader) -> Order:
    line = await orders.readline()
    if not line:  # the parent died
        os._exit(1)
    return _ORDER.decode(line)


async def _follow_replica(
    api: ApiProcess, replica: int, following: str | None, nexts: asyncio.Queue[str | None]
) -> None:
    """Connect to one engine of a replica after the other."""
    if following is None:
        api.first.client.give_up(replica, "the engine stopped")
    while following is not None:
        current = following
        async with api.first.connected(current, replica):
            while (following := await nexts.get()) == current:
                pass  # it was ordered as the process was started, too
            if following is None:
                api.first.client.give_up(replica, "the engine stopped")


async def _announce(api: ApiProcess) -> None:
    await api.first.client.wait_started()
    _report(READY_LINE)


async def _live() -> None:
    """Report signs of life; a blocked event loop gives none."""
    while True:
        _report(ALIVE_LINE)
        await asyncio.sleep(ALIVE_S)


def _report(line: bytes) -> None:
    os.write(sys.stdout.fileno(), line)


@contextlib.asynccontextmanager
async def _stdin() -> AsyncIterator[asyncio.StreamReader]:
    reader = asyncio.StreamReader(limit=1 << 20)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    try:
        yield reader
    finally:
        transport.close()


def main() -> int:
    """Run on the listening sockets whose descriptors are the arguments."""
    with contextlib.ExitStack() as sockets:
        listeners = [sockets.enter_context(socket.socket(fileno=int(word))) for word in sys.argv[1:]]
        try:
            return run_measured(serve(listeners))
        except StartupError as error:
            _log.error("%s", error)
            return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
