"""The owner's side of a fork server: starts the process with the first job, and again if it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from jaxserve.errors import UnavailableError
from jaxserve.forkserver.frames import Frames, framed

Reply = TypeVar("Reply")

_log = logging.getLogger(__name__)

_GRACE_S: Final = 60.0
"""Seconds that the start of the process and waits for a processor may take, beside the time of the jobs themselves."""
_READ_BYTES: Final = 1 << 16


class ForkServerClient:
    """Jobs of one API process for one fork server. `aclose` ends it."""

    def __init__(self, module: str, does: str, *, max_jobs: int, timeout_s: float) -> None:
        """module: its main module; does: what it does, for errors and the log ("checks grammars"); max_jobs: that run at
        the same time, others wait; timeout_s: processor seconds of one job."""
        self.module, self.does = module, does
        self.deadline_s = _GRACE_S + max_jobs * timeout_s
        """Seconds without the reply to a job after which the process counts as hanging and is killed."""
        self.process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._turns = asyncio.Semaphore(max_jobs)
        self._exchanges: set[asyncio.Task[bytes]] = set()
        """The jobs that have a turn."""
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}

    async def ask(self, job: object, spec: Callable[[], object], reply_type: type[Reply]) -> Reply:
        """Return the reply to a job. spec: returns what the service is made from, if a process has to be started.

        Raises UnavailableError if the process ends or hangs meanwhile, the next job starts another; or if it cannot fork.
        """
        await self._turns.acquire()
        exchange = asyncio.create_task(self._exchange(job, spec))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._end)
        await asyncio.wait({exchange})  # and if the caller is cancelled, the job still has its turn: its child runs on
        return msgspec.msgpack.decode(exchange.result(), type=reply_type)

    async def _exchange(self, job: object, spec: Callable[[], object]) -> bytes:
        """Send a job and return its reply."""
        number = next(self._numbers)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        process = await self._running(spec)
        waiting = self._waiting
        waiting[number] = reply
        try:
            async with asyncio.timeout(self.deadline_s):
                assert process.stdin is not None
                process.stdin.write(framed(number, msgspec.msgpack.encode(job)))
                await process.stdin.drain()
                return await reply
        except TimeoutError:
            _log.error("the process that %s did not answer within %g s", self.does, self.deadline_s)
            _kill(process)
            raise self._gone() from None
        except (BrokenPipeError, ConnectionResetError):
            raise self._gone() from None
        finally:
            waiting.pop(number, None)

    def _end(self, exchange: asyncio.Task[bytes]) -> None:
        """Pass on the turn of a job that has ended."""
        self._exchanges.discard(exchange)
        self._turns.release()
        if not exchange.cancelled():
            exchange.exception()  # else asyncio logs one that no caller waits for any more

    async def aclose(self) -> None:
        """End the process."""
        if self._reading is not None:  # first, so that the end of the process is not logged as an error
            self._reading.cancel()
            await asyncio.wait({self._reading})
        if self.process is not None:
            _kill(self.process)
            await self.process.wait()

    async def _running(self, spec: Callable[[], object]) -> asyncio.subprocess.Process:
        async with self._starting:
            if self.process is None or self.process.returncode is not None:
                content, pipe = msgspec.msgpack.encode(spec()), asyncio.subprocess.PIPE
                self.process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", self.module, stdin=pipe, stdout=pipe, start_new_session=True
                )
                assert self.process.stdin is not None
                self.process.stdin.write(framed(0, content))
                self._waiting = {}
                self._reading = asyncio.create_task(self._read(self.process, self._waiting))
            return self.process

    async def _read(self, process: asyncio.subprocess.Process, waiting: dict[int, asyncio.Future[bytes]]) -> None:
        """Deliver replies until the process ends, then fail the jobs that are still `waiting`."""
        assert process.stdout is not None
        frames = Frames()
        try:
            while data := await process.stdout.read(_READ_BYTES):
                for number, content in frames.push(data):
                    reply = waiting.pop(number, None)
                    if not content:
                        _log.error(
                            "the process that %s cannot start a child: no process, memory or file is left", self.does
                        )
                    if reply is not None and not reply.done():
                        if content:
                            reply.set_result(content)
                        else:
                            reply.set_exception(self._gone("cannot start a child now"))
            _log.error("the process that %s ended with %s", self.does, await process.wait())
        finally:
            for reply in waiting.values():
                if not reply.done():
                    reply.set_exception(self._gone())

    def _gone(self, what: str = "ended") -> UnavailableError:
        return UnavailableError(f"The process that {self.does} {what}. Please retry.")


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
