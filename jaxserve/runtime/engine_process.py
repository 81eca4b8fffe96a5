"""Starts and ends the engine process. Runs in the API process: asyncio, and no jax."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Mapping

import msgspec

from jaxserve.ipc.engine_spec import EngineSpec
from jaxserve.runtime.spawn import Spawned, spawn


class EngineProcess:
    """A running engine process. It lives no longer than we do: its stdin ends when we end."""

    def __init__(self, process: Spawned) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, spec: EngineSpec, environment: Mapping[str, str] | None = None, process: Spawned | None = None
    ) -> EngineProcess:
        """Hand `spec` to `process`, or to one that is spawned for it.

        Readiness and failures are told over the socket; an exit code, later, by `wait`.
        environment: as `spawn` takes it.
        """
        process = process or spawn(environment)
        if process.stdin is None:
            raise RuntimeError("the engine process has no stdin")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died at once: `wait` tells
            process.stdin.write(_without_secrets(spec).to_line())
            process.stdin.flush()  # a pipe holds it: a specification has a few KB
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative when a signal ended it."""
        return self._process.returncode

    async def wait(self) -> int:
        """The exit code: 0 stopped as told, 1 broken, 2 could not start."""
        if self._process.poll() is None:
            await _ended(self._process.pid)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # what it never read
                self._process.stdin.close()
        return self._process.wait()

    async def terminate(self, timeout_s: float) -> int:
        """Ask it to stop; kill it when it has not after `timeout_s`. Returns the exit code."""
        self._process.terminate()
        try:
            return await asyncio.wait_for(self.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            return await self.wait()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()


async def _ended(pid: int) -> None:
    """Wait for the end of a child that nobody has reaped."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(pid)  # readable when the process has ended
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _without_secrets(spec: EngineSpec) -> EngineSpec:
    """The engine has no use for API keys."""
    server = dataclasses.replace(spec.config.server, api_key=None)
    return msgspec.structs.replace(spec, config=dataclasses.replace(spec.config, server=server))
