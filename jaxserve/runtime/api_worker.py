"""A further API process: `python -m jaxserve.runtime.api_worker LISTENER`, started by `runtime/api_workers`.

argument  the descriptor of its listening socket
stdin     one line, an ApiWorkerSpec; then orders, each a line: NextEngine where the engine is gone and another is
          started, Stop where there will be none; its end is the parent's death, and ours
stdout    one line when it takes requests
SIGTERM   drain and exit 0
SIGINT    after that: at once
exit      0 stopped, 1 told to stop or the parent is gone, 2 could not start
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
from jaxserve.runtime.api_process import ApiProcess, serving_api, tokenizer_of
from jaxserve.runtime.tasks import StopSignals, first_of, in_thread, running

_log = logging.getLogger(__name__)

READY_LINE: Final = b"ready\n"


class ApiWorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a further API process needs to start."""

    config: Config
    model_path: str
    address: str
    """Where the first engine listens."""
    index: int
    """Its number; the parent is 0."""

    def to_line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


class NextEngine(msgspec.Struct, frozen=True, tag_field="order", tag="next_engine"):
    """The engine is gone: end its requests, and turn to the next one."""

    address: str


class Stop(msgspec.Struct, frozen=True, tag_field="order", tag="stop"):
    """The server ends: end all requests with an error, and exit."""

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
                api.install(tokenizer, Path(spec.model_path))
                return await _live(api, spec.address, orders, stop)


async def _live(api: ApiProcess, address: str, orders: asyncio.StreamReader, stop: StopSignals) -> int:
    async with running(_engine_lives(api, address, orders)) as engine_lives, running(_announce(api)):
        await first_of(stop.first.wait(), asyncio.wait({engine_lives}))
        if not engine_lives.done():
            await api.drain(stop.second, asyncio.wait({engine_lives}))
            return 0
        await api.fail(engine_lives.result(), stop.first)
        return 1


async def _engine_lives(api: ApiProcess, address: str, orders: asyncio.StreamReader) -> str:
    """Turn from one engine to the next as we are told; returns why there is none any more."""
    while True:
        async with api.engine_life(address):
            order = await _next_order(orders)
            if isinstance(order, Stop):
                api.client.fail(order.reason)  # here: behind the block requests would be told to wait for the next
                return order.reason
        address = order.address


async def _announce(api: ApiProcess) -> None:
    await api.client.wait_started()
    sys.stdout.buffer.write(READY_LINE)
    sys.stdout.flush()


async def _next_order(orders: asyncio.StreamReader) -> Order:
    """What the parent wants. Without one there is nobody to serve for: exits at once."""
    line = await orders.readline()
    if not line:
        os._exit(1)
    return _ORDER.decode(line)


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
    """Run with the listening socket that the first argument names."""
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        try:
            return asyncio.run(serve(listener))
        except StartupError as error:
            _log.error("%s", error)
            return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
