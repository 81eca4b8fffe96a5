"""An additional API process: `python -m jaxserve.runtime.api_worker LISTENER`, started by `runtime.api_workers`.

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
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from jaxserve.config import Config
from jaxserve.errors import StartupError
from jaxserve.log import configure_logging
from jaxserve.runtime.api_process import ApiProcess, install, serving_api, tokenizer_of
from jaxserve.runtime.tasks import StopSignals, first_of, in_thread, running

_log = logging.getLogger(__name__)

READY_LINE: Final = b"ready\n"


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


async def serve(listener: socket.socket) -> int:
    """Run one API process; returns the exit code."""
    async with _stdin() as orders:
        spec = msgspec.json.decode(await orders.readline(), type=ApiWorkerSpec)
        configure_logging(spec.config.server.log_level, spec.config.server.log_format)
        stop = StopSignals()
        with stop.caught():
            tokenizer = await in_thread(lambda: tokenizer_of(spec.config, Path(spec.model_path)))
            async with serving_api(spec.config, spec.address, listener, spec.index) as api:
                install(api.state.frontend, spec.config, tokenizer, Path(spec.model_path))
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
