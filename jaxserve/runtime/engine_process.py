"""An engine process as seen by the process that owns it: start, wait until ready, wait until it ends. Imports no jax."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path
from typing import Final

import msgspec

from jaxserve.errors import CheckpointError, StartupError
from jaxserve.frontend.engine_client.connection import EngineConnection
from jaxserve.ipc.address import remove_socket
from jaxserve.ipc.engine_spec import EngineSpec
from jaxserve.ipc.messages import ModelInfo
from jaxserve.runtime.devices import ALL_DEVICES, ReplicaDevices
from jaxserve.runtime.environment import engine_environment
from jaxserve.runtime.spawn import Spawned, spawn
from jaxserve.runtime.tasks import first_of
from jaxserve.tokenizer.tokenizer import Tokenizer

LAST_MESSAGES_S: Final = 0.2
"""Time in which messages of a dead engine may still arrive."""
RECORD_S: Final = 2.0
"""Time in which an engine that has stalled may write its flight record before it is killed."""
ENGINE_STOP_TIMEOUT_S: Final = 5.0


class EngineProcess:
    """A running engine process. It ends when the process that started it ends: its stdin is closed then."""

    def __init__(self, process: Spawned) -> None:
        self._process = process

    @classmethod
    async def start(
        cls,
        spec: EngineSpec,
        environment: Mapping[str, str] | None = None,
        process: Spawned | None = None,
        cores: Collection[int] | None = None,
    ) -> EngineProcess:
        """Send `spec` to `process`, or to a process that is spawned for it with `environment` and `cores` (as for `spawn`).

        The engine reports readiness and failures over the socket; `wait` returns its exit code.
        """
        process = process or spawn(environment, cores=cores)
        server = dataclasses.replace(spec.config.server, api_key=None)  # the engine needs no keys
        config = dataclasses.replace(spec.config, server=server)
        if process.stdin is None:
            raise RuntimeError("the engine process has no stdin")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died already: `wait` returns the code
            process.stdin.write(msgspec.structs.replace(spec, config=config).to_line())
            process.stdin.flush()  # does not block: a specification has a few KB, a pipe holds 64
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; None while the process runs, negative if a signal ended it."""
        return self._process.returncode

    @property
    def exit_text(self) -> str:
        """Return how the process ended, in words."""
        return f"the engine process {self._process.exit_text}"

    async def wait(self) -> int:
        """Return the exit code: 0 stopped on request, 1 failed, 2 could not start."""
        if self._process.poll() is None:
            await _ended(self._process.pid)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it did not read everything
                self._process.stdin.close()
        return self._process.wait()

    async def terminate(self, timeout_s: float) -> int:
        """Ask the process to stop, kill it after `timeout_s`, and return its exit code."""
        self._process.terminate()
        try:
            return await asyncio.wait_for(self.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            return await self.wait()

    def ask_for_record(self) -> None:
        """Let the engine write its flight record, although it answers no messages."""
        self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        self._process.kill()


@contextlib.asynccontextmanager
async def engine_process(
    spec: EngineSpec, process: Spawned | None = None, devices: ReplicaDevices = ALL_DEVICES
) -> AsyncIterator[EngineProcess]:
    """Run an engine inside the block and end it after the block. Raises StartupError if no process can be started.

    process: used instead of a new one. devices: of the new process.
    """
    try:
        environment = {**engine_environment(), **devices.variables}
        engine = await EngineProcess.start(spec, environment, process, devices.cores)
    except OSError as error:
        raise StartupError(f"cannot start the engine process: {error.strerror}") from error
    try:
        yield engine
    finally:
        try:
            await engine.terminate(ENGINE_STOP_TIMEOUT_S)
        finally:
            remove_socket(spec.address)


async def wait_started(connection: EngineConnection, engine: EngineProcess) -> ModelInfo:
    """Return the loaded model's info.

    Raises StartupError if the engine reports a failure, ends before it is ready or makes no progress for too long.
    """
    await first_of(connection.wait_started(), engine.wait(), _end_if_stuck(connection))
    if connection.model_info is None:
        await asyncio.sleep(LAST_MESSAGES_S)
        connection.end(f"{engine.exit_text} before it was ready")  # no effect if the engine gave a reason
    return await connection.wait_started()


async def _end_if_stuck(connection: EngineConnection) -> None:
    connection.end(await connection.watch.wait_stuck())


async def wait_dead(connection: EngineConnection, engine: EngineProcess) -> str:
    """Wait until the engine has ended and its last messages are read; returns how it ended. Kills one that stalls."""
    await first_of(connection.wait_over(), engine.wait(), connection.wait_stalled())
    if engine.returncode is None:
        engine.ask_for_record()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.wait(), RECORD_S)
    await asyncio.sleep(LAST_MESSAGES_S)
    reason = connection.reason or engine.exit_text
    engine.kill()
    return reason


def check_tokenizer(tokenizer: Tokenizer, model_info: ModelInfo, path: Path) -> None:
    """Raise CheckpointError for a tokenizer with ids that the model does not have."""
    if tokenizer.max_token_id >= model_info.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has ids up to {tokenizer.max_token_id}, the model's embedding has only "
            f"{model_info.vocab_size} rows: they do not belong together"
        )


async def _ended(pid: int) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(pid)  # readable when the process has ended
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
