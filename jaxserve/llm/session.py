"""The engine of one LLM: its process, the client that talks to it, and what requests need besides."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Literal

from jaxserve.checkpoint.source import resolve
from jaxserve.cli.api_process import ApiProcess, make_state, tokenizer_of
from jaxserve.cli.engine_life import ENGINE_STOP_TIMEOUT_S, LAST_WORDS_S, check_tokenizer, obituary, wait_started
from jaxserve.cli.options import child_environment
from jaxserve.cli.tasks import first_of, in_thread, running
from jaxserve.config import Config
from jaxserve.engine.launcher import EngineProcess
from jaxserve.engine.spec import EngineSpec
from jaxserve.executor.fake import FakeOptions
from jaxserve.ipc.address import folder_of, own_address
from jaxserve.ipc.messages import StartupProgress
from jaxserve.ipc.transport import EngineConnection
from jaxserve.server.client import EngineClient
from jaxserve.server.siblings import Siblings
from jaxserve.server.state import ServerState
from jaxserve.server.tokenization import tokenization


@contextlib.asynccontextmanager
async def engine_session(
    config: Config,
    executor: Literal["local", "fake"],
    fake: FakeOptions,
    on_progress: Callable[[StartupProgress], None],
) -> AsyncIterator[ServerState]:
    """A ready engine inside the block, and what the server's own code needs to ask it: a server without a port."""
    with (
        own_address(config.server.uds_dir) as address,
        contextlib.closing(EngineConnection(address)) as connection,
        tokenization() as tokens,
    ):
        state = make_state(config, Siblings(0, 1, folder_of(address)), connection, tokens, on_progress)
        async with (
            contextlib.aclosing(state.grammars),
            running(state.client.run()),
            _engine(config, address, executor, fake, state),
        ):
            yield state


@contextlib.asynccontextmanager
async def _engine(
    config: Config, address: str, executor: Literal["local", "fake"], fake: FakeOptions, state: ServerState
) -> AsyncIterator[None]:
    """The process, loaded; its end ends what is under way with an error."""
    path = await in_thread(lambda: resolve(config.model.model, config.model.revision))
    spec = EngineSpec(config=config, model_path=str(path), address=address, executor=executor, fake=fake)
    engine = await EngineProcess.start(spec, child_environment())
    try:
        tokenizer = await in_thread(lambda: tokenizer_of(config, path))
        ApiProcess(config, state).install(tokenizer, path)
        check_tokenizer(tokenizer, await wait_started(state.client, engine), path)
        async with running(_mourn(state.client, engine)):
            yield
    finally:
        await engine.terminate(ENGINE_STOP_TIMEOUT_S)


async def _mourn(client: EngineClient, engine: EngineProcess) -> None:
    await first_of(engine.wait(), client.wait_failed())
    await asyncio.sleep(LAST_WORDS_S)
    client.fail(obituary(engine.returncode))
