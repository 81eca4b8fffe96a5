"""Starts and ends the engine process. Runs in the API process: asyncio, and no jax."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import Mapping
from typing import Final

import msgspec

from jaxserve.engine.spec import EngineSpec
from jaxserve.types import GPU_SHARE

_MALLOC: Final = {"hugetlb": 1, "mmap_threshold": 256 << 20, "trim_threshold": 256 << 20, "arena_max": 1}
ENVIRONMENT: Final = {
    "GLIBC_TUNABLES": ":".join(f"glibc.malloc.{name}={value}" for name, value in _MALLOC.items()),
    "XLA_PYTHON_CLIENT_MEM_FRACTION": str(GPU_SHARE),
}
"""Unless it says otherwise itself. JAX alone would leave a quarter of a GPU to others. On CPUs: weights and KV pool in large pages where the kernel gives them on request: with
pages of 4 KiB a CPU spends a third of a one-row step on finding addresses. And a step's scratch memory stays ours
between steps: else the kernel hands out the same 40 MB anew, and clears them, at every step of 32 rows."""


class EngineProcess:
    """A running engine process. It lives no longer than we do: its stdin ends when we end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, spec: EngineSpec, environment: Mapping[str, str] | None = None) -> EngineProcess:
        """Spawn the process and hand it `spec`. Its stdout and stderr are ours.

        Readiness and failures are told over the socket; an exit code, later, by `wait`. The process gets a session of
        its own, so that a Ctrl-C in the terminal reaches us alone and we decide.

        environment: put over ENVIRONMENT; None: ours as it is.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "jaxserve.engine.process",
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=None if environment is None else {**ENVIRONMENT, **environment},
        )
        if process.stdin is None:
            raise RuntimeError("the engine process has no stdin")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died at once: `wait` tells
            process.stdin.write(_without_secrets(spec).to_line())
            await process.stdin.drain()
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
        return await self._process.wait()

    async def terminate(self, timeout_s: float) -> int:
        """Ask it to stop; kill it when it has not after `timeout_s`. Returns the exit code."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            return await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            return await self._process.wait()

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


def _without_secrets(spec: EngineSpec) -> EngineSpec:
    """The engine has no use for API keys."""
    server = dataclasses.replace(spec.config.server, api_key=None)
    return msgspec.structs.replace(spec, config=dataclasses.replace(spec.config, server=server))
