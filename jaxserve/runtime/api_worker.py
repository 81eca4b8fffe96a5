"""One additional API process, as its parent sees it: start, orders, signs of life, end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec

from jaxserve.runner.host.cgroup import oom_kills
from jaxserve.runtime.spawn import exit_text
from jaxserve.runtime.tasks import first_of

READY_LINE: Final = b"ready\n"
SUSPENDED_LINE: Final = b"suspended\n"
ALIVE_LINE: Final = b"alive\n"
ALIVE_S: Final = 1.0
"""Time between two signs of life."""
MIN_SILENCE_S: Final = 5.0
"""The least time of silence that counts, whatever is set: signs of life may be late on a busy machine."""
_LOOKS: Final = 8
"""Number of checks that find a process silent before it counts as frozen: a pause of the parent itself proves nothing."""


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


class ApiWorker:
    """A process that runs. It ends when its parent ends: its stdin is closed then."""

    def __init__(self, process: asyncio.subprocess.Process, num_oom_kills: int) -> None:
        """num_oom_kills: as for `exit_text`."""
        self.process = process
        self._num_oom_kills = num_oom_kills
        self.suspended = asyncio.Event()
        """Set when the process has reported that it is suspended, or has ended."""
        self.is_silent = False
        """True once it reports nothing more, because it has ended."""
        self._alive = asyncio.Event()
        """Set when the process has given its first sign of life, or has ended. Before that SIGHUP ends it or is ignored."""
        self._must_reload = False
        """True: the process gets SIGHUP after its first sign of life."""
        self._is_ready = False
        self._ready = asyncio.Event()
        self._num_lines = 0
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, module: str, line: bytes, listeners: Sequence[socket.socket]) -> ApiWorker:
        """Start `module` with the descriptors of its listening sockets as arguments, and send it its first line.

        It gets a separate session: a Ctrl-C in the terminal reaches the parent only, which then decides.
        """
        num_oom_kills = oom_kills()  # before it can be killed itself
        descriptors = [listener.fileno() for listener in listeners]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *map(str, descriptors),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=descriptors,
            start_new_session=True,
        )
        worker = cls(process, num_oom_kills)
        await worker._write(line)
        return worker

    @property
    def has_ended(self) -> bool:
        return self.process.returncode is not None

    async def wait_ended(self) -> str:
        """Wait until the process has ended; returns how, in words that follow its name."""
        return exit_text(await self.process.wait(), self._num_oom_kills)

    async def send(self, order: Order) -> None:
        """Send an order; nothing happens if the process is dead."""
        await self._write(msgspec.json.encode(order) + b"\n")

    async def wait_ready(self) -> bool:
        """Wait until the process accepts requests; False if it ends before."""
        await self._ready.wait()
        return self._is_ready

    async def wait_ready_or_slow(self, timeout_s: float) -> None:
        """Wait until the process accepts requests, for at most `timeout_s` after its first sign of life."""
        await self._alive.wait()
        await first_of(self._ready.wait(), asyncio.sleep(timeout_s))

    def reload(self) -> None:
        """Let the process read the API keys and the certificate again, as soon as it handles the signal."""
        if not self._alive.is_set():
            self._must_reload = True
        elif not self.has_ended:
            self.process.send_signal(signal.SIGHUP)

    async def wait_lost(self, silence_s: float, startup_s: float) -> str:
        """Wait until the process has ended, or was silent for too long and was killed; returns what happened.

        silence_s, startup_s: the longest silence once it has started, and before that. 0: no limit.
        """
        ended: asyncio.Task[str] = asyncio.create_task(self.wait_ended())
        alive: asyncio.Task[object] = asyncio.create_task(self._alive.wait())
        try:
            num_silent, limit_s = 0, 0.0
            while num_silent < _LOOKS:
                num_lines = self._num_lines
                limit_s = (silence_s and max(silence_s, MIN_SILENCE_S)) if num_lines else startup_s
                # The first sign of life ends a look that is as long as the start may take.
                watched: set[asyncio.Task[Any]] = {ended} if self._alive.is_set() else {ended, alive}
                look_s = (limit_s or MIN_SILENCE_S) / _LOOKS
                await asyncio.wait(watched, timeout=look_s, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    return ended.result()
                num_silent = num_silent + 1 if limit_s and self._num_lines == num_lines else 0
            await self.kill()
            return f"gave no sign of life for {limit_s:g} s and was killed"
        finally:
            ended.cancel()
            alive.cancel()

    async def kill(self) -> None:
        """End the process at once, if it still runs."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        await self.process.wait()

    async def _write(self, line: bytes) -> None:
        assert self.process.stdin is not None, "stdin is a pipe"
        with contextlib.suppress(ConnectionError):  # it is dead: `wait_lost` reports it
            self.process.stdin.write(line)
            await self.process.stdin.drain()

    async def _read(self) -> None:
        assert self.process.stdout is not None, "stdout is a pipe"
        while line := await self.process.stdout.readline():
            self._num_lines += 1
            self._alive.set()
            if self._must_reload:
                self._must_reload = False
                self.reload()
            if line == READY_LINE:
                self._is_ready = True
                self._ready.set()
            elif line == SUSPENDED_LINE:
                self.suspended.set()
        self.is_silent = True
        self._alive.set()
        self._ready.set()
        self.suspended.set()
