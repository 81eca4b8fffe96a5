"""The API processes that share one port: their numbers, and questions among them.

Each listens on a private Unix socket beside the engine's and answers one question per connection: for a snapshot of
its metrics (the process that serves `/metrics` collects them all), or on further topics. The counts that it reported last are in
a file beside its socket: they belong to the sums while it is gone, and the process that takes its place adds them to its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from jaxserve.errors import UnavailableError
from jaxserve.ipc.address import API_PREFIX
from jaxserve.metrics import FamilySnapshot, Metrics, counted, exposition, merged

_log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 2.0
_METRICS: Final = "metrics"

Answer = Callable[[str], Awaitable[bytes]]
"""Makes an answer from the subject of a question."""
NO_ANSWERS: Final[Mapping[str, Answer]] = MappingProxyType({})


class Question(msgspec.Struct):
    """A question of one process to another."""

    topic: str
    subject: str


_QUESTION: Final = msgspec.msgpack.Decoder(Question)
_SNAPSHOT: msgspec.msgpack.Decoder[list[FamilySnapshot]] = msgspec.msgpack.Decoder(list[FamilySnapshot])


@dataclass(frozen=True, slots=True)
class PeerProcesses:
    """This API process among those of its server."""

    index: int
    count: int
    directory: Path
    """The private directory of their sockets."""

    def share_of(self, limit: int) -> int:
        """Return this process's share of a limit on the whole server, rounded up."""
        return -(-limit // self.count)

    @contextlib.asynccontextmanager
    async def answering(self, metrics: Metrics, answers: Mapping[str, Answer] = NO_ANSWERS) -> AsyncIterator[None]:
        """Answer the peers' questions inside the block: for metrics, and on the topics of `answers`."""
        if self.count == 1:
            yield
            return

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError), contextlib.closing(writer):
                question = _QUESTION.decode(await reader.read())
                if question.topic == _METRICS:
                    writer.write(msgspec.msgpack.encode(await self._report(metrics)))
                else:
                    writer.write(await answers[question.topic](question.subject))
                await writer.drain()

        with contextlib.suppress(FileNotFoundError):
            self._counts(self.index).replace(self._inherited)
        path = self._socket(self.index)
        server = await asyncio.start_unix_server(answer, path)
        try:
            yield
        finally:
            server.close()
            path.unlink(missing_ok=True)
            if self.index == 0:  # it ends last
                for file in (*self.directory.glob("api-*.counts"), *self.directory.glob("api-*.inherited")):
                    file.unlink(missing_ok=True)

    async def exposition(self, metrics: Metrics, *, is_ending: bool = False) -> bytes:
        """Return the sums over all API processes, in the Prometheus text format.

        Raises UnavailableError if a process does not answer in time, or is gone while the server ends. Without its numbers the sums would fall, and
        Prometheus would take them for counters that began at 0 again: it counts all that they had as new.
        """
        answers = await self._numbers_of_others()
        for answer in answers.values():
            if isinstance(answer, UnavailableError) and (is_ending or not isinstance(answer, _NoProcessError)):
                raise answer
        gone = [_read(self._counts(index)) for index, answer in answers.items() if isinstance(answer, _NoProcessError)]
        return exposition(await self._report(metrics), *_given(answers), *gone)

    async def snapshots(self, metrics: Metrics) -> list[list[FamilySnapshot]]:
        """Return the metrics of the API processes that answer in time, beginning with those of this one."""
        return [await self._report(metrics), *_given(await self._numbers_of_others())]

    async def ask(self, index: int, topic: str, subject: str) -> bytes:
        """Return another process's answer. Raises UnavailableError if it gives none in time."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(self._socket(index))
                with contextlib.closing(writer):
                    writer.write(msgspec.msgpack.encode(Question(topic, subject)))
                    writer.write_eof()
                    data = await reader.read()
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise _silent(index, str(error), _NoProcessError) from error
        except (OSError, TimeoutError) as error:
            raise _silent(index, str(error) or type(error).__name__) from error
        if not data:
            raise _silent(index, "it hung up")
        return data

    async def _report(self, metrics: Metrics) -> list[FamilySnapshot]:
        """Return the metrics of this process with the counts of those before it in its place, and keep the counts."""
        if self.count == 1:
            return metrics.snapshot()
        found = merged([metrics.snapshot(), _read(self._inherited)])
        with contextlib.suppress(OSError):  # a sum may then fall, should this process die
            await asyncio.to_thread(_write, self._counts(self.index), msgspec.msgpack.encode(counted(found)))
        return found

    async def _numbers_of_others(self) -> dict[int, list[FamilySnapshot] | UnavailableError]:
        """Return the metrics of each other process by its number, or the reason why it gave none."""

        async def numbers_of(index: int) -> list[FamilySnapshot] | UnavailableError:
            try:
                return _SNAPSHOT.decode(await self.ask(index, _METRICS, ""))
            except UnavailableError as error:
                return error
            except msgspec.DecodeError as error:
                return _silent(index, str(error))

        others = [index for index in range(self.count) if index != self.index]
        return dict(zip(others, await asyncio.gather(*map(numbers_of, others)), strict=True))

    def _socket(self, index: int) -> Path:
        return self.directory / f"{API_PREFIX}{index}.sock"

    def _counts(self, index: int) -> Path:
        return self.directory / f"{API_PREFIX}{index}.counts"

    @property
    def _inherited(self) -> Path:
        return self.directory / f"{API_PREFIX}{self.index}.inherited"


class _NoProcessError(UnavailableError):
    """No process listens: it starts, or it is gone and its numbers with it."""


def _silent(index: int, reason: str, kind: type[UnavailableError] = UnavailableError) -> UnavailableError:
    _log.warning("API process %d does not answer: %s", index, reason)
    return kind("The API process that could tell does not answer. Please retry.")


def _given(answers: Mapping[int, list[FamilySnapshot] | UnavailableError]) -> list[list[FamilySnapshot]]:
    return [answer for answer in answers.values() if not isinstance(answer, UnavailableError)]


def _read(path: Path) -> list[FamilySnapshot]:
    """Return the counts in a file; none without it."""
    try:
        return _SNAPSHOT.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return []


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all. Threads that write at the same time have files of their own."""
    new = path.with_suffix(f".{threading.get_ident()}")
    new.write_bytes(data)
    new.replace(path)
