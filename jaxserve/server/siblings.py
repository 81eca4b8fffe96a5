"""The API processes that share one port: which one this is, and how they tell each other their numbers.

Each listens on a private Unix socket beside the engine's and answers every connection with a snapshot of
its metrics. Whoever is asked for `/metrics` collects them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from jaxserve.metrics import FamilySnapshot, Metrics, exposition

_log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 2.0
_SNAPSHOT: msgspec.msgpack.Decoder[list[FamilySnapshot]] = msgspec.msgpack.Decoder(list[FamilySnapshot])


@dataclass(frozen=True, slots=True)
class Siblings:
    """This API process among those of its server."""

    index: int
    count: int
    directory: Path
    """Where their sockets are: private to us."""

    def share_of(self, limit: int) -> int:
        """Our part of a limit on the whole server, rounded up."""
        return -(-limit // self.count)

    @contextlib.asynccontextmanager
    async def answering(self, metrics: Metrics) -> AsyncIterator[None]:
        """Tell the others our numbers inside the block."""
        if self.count == 1:
            yield
            return

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError), contextlib.closing(writer):
                writer.write(msgspec.msgpack.encode(metrics.snapshot()))
                await writer.drain()

        path = self._socket(self.index)
        server = await asyncio.start_unix_server(answer, path)
        try:
            yield
        finally:
            server.close()
            path.unlink(missing_ok=True)

    async def exposition(self, metrics: Metrics) -> bytes:
        """The sums over all API processes, in the Prometheus text format."""
        others = [index for index in range(self.count) if index != self.index]
        snapshots = await asyncio.gather(*map(self._ask, others))
        return exposition(metrics.snapshot(), *snapshots)

    async def _ask(self, index: int) -> list[FamilySnapshot]:
        """The numbers of another process; none while it starts or when it is gone."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(self._socket(index))
                with contextlib.closing(writer):
                    return _SNAPSHOT.decode(await reader.read())
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            _log.warning("API process %d does not tell its metrics: %s", index, error)
            return []

    def _socket(self, index: int) -> Path:
        return self.directory / f"api-{index}.sock"
