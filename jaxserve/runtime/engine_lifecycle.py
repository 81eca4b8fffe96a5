"""What the owner of an engine process does at its start and its end, whoever asks for generations."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from jaxserve.errors import CheckpointError, StartupError
from jaxserve.frontend.engine_client.connection import EngineConnection
from jaxserve.ipc.address import remove_socket
from jaxserve.ipc.engine_spec import EngineSpec
from jaxserve.ipc.messages import ModelInfo
from jaxserve.runtime.engine_process import EngineProcess
from jaxserve.runtime.environment import child_environment
from jaxserve.runtime.spawn import Spawned
from jaxserve.runtime.tasks import first_of
from jaxserve.tokenizer.tokenizer import Tokenizer

LAST_WORDS_S: Final = 0.2
"""How long messages of a dead engine may still arrive."""
ENGINE_STOP_TIMEOUT_S: Final = 5.0


@contextlib.asynccontextmanager
async def engine_process(spec: EngineSpec, process: Spawned | None = None) -> AsyncIterator[EngineProcess]:
    """An engine inside the block; it has ended behind it. Raises StartupError where there can be no process.

    process: to be used instead of a new one.
    """
    try:
        engine = await EngineProcess.start(spec, child_environment(), process)
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
    """Return the info of the loaded model. Raises StartupError when the engine refuses, or ends before it is ready."""
    await first_of(connection.wait_started(), engine.wait())
    if connection.model_info is None:
        await asyncio.sleep(LAST_WORDS_S)
        connection.end(f"{obituary(engine.returncode)} before it was ready")  # unless it said why
    return await connection.wait_started()


async def wait_dead(connection: EngineConnection, engine: EngineProcess) -> str:
    """Wait for the end of an engine and for its last words; returns how it ended. One that only hangs is killed."""
    await first_of(connection.wait_over(), engine.wait(), connection.wait_stalled())
    await asyncio.sleep(LAST_WORDS_S)
    reason = connection.reason or obituary(engine.returncode)
    engine.kill()
    return reason


def check_tokenizer(tokenizer: Tokenizer, model_info: ModelInfo, path: Path) -> None:
    """Raise CheckpointError for a tokenizer with ids that the model does not have."""
    if tokenizer.max_token_id >= model_info.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has ids up to {tokenizer.max_token_id}, the model's embedding has only "
            f"{model_info.vocab_size} rows: they do not belong together"
        )


def obituary(code: int | None) -> str:
    """How the process ended, from its exit code."""
    if code is not None and code < 0:
        return f"the engine process was ended by signal {-code}"
    return f"the engine process ended with exit code {code}"
