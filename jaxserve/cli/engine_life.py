"""What the owner of an engine process does at its start and its end, whoever asks for generations."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from jaxserve.cli.tasks import first_of
from jaxserve.engine.launcher import EngineProcess
from jaxserve.errors import CheckpointError
from jaxserve.ipc.messages import ModelFacts
from jaxserve.server.client import EngineClient
from jaxserve.tokenizer.tokenizer import Tokenizer

LAST_WORDS_S: Final = 0.2
"""How long messages of a dead engine may still arrive."""
ENGINE_STOP_TIMEOUT_S: Final = 5.0


async def wait_started(client: EngineClient, engine: EngineProcess) -> ModelFacts:
    """The facts of the loaded model. Raises StartupError when the engine refuses, or ends before it is ready."""
    await first_of(client.wait_started(), engine.wait())
    if client.facts is None:
        await asyncio.sleep(LAST_WORDS_S)
        client.fail(f"{obituary(engine.returncode)} before it was ready")  # unless it said why
    return await client.wait_started()


def check_tokenizer(tokenizer: Tokenizer, facts: ModelFacts, path: Path) -> None:
    """Raise CheckpointError for a tokenizer with ids that the model does not have."""
    if tokenizer.max_token_id >= facts.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has ids up to {tokenizer.max_token_id}, the model's embedding has only "
            f"{facts.vocab_size} rows: they do not belong together"
        )


def obituary(code: int | None) -> str:
    """How the process ended, from its exit code."""
    if code is not None and code < 0:
        return f"the engine process was ended by signal {-code}"
    return f"the engine process ended with exit code {code}"
