"""The engine of one LLM: its process, the client that talks to it, and what requests need besides."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Literal

from jaxserve.checkpoint.source import resolve
from jaxserve.cli.api_process import ApiProcess, model_names, tokenizer_of
from jaxserve.cli.engine_life import ENGINE_STOP_TIMEOUT_S, LAST_WORDS_S, check_tokenizer, obituary, wait_started
from jaxserve.cli.options import child_environment
from jaxserve.cli.tasks import first_of, in_thread, running
from jaxserve.config import Config
from jaxserve.engine.launcher import EngineProcess
from jaxserve.engine.spec import EngineSpec
from jaxserve.executor.fake import FakeOptions
from jaxserve.ipc.address import discard_address, folder_of, new_address
from jaxserve.ipc.messages import StartupProgress
from jaxserve.ipc.transport import EngineConnection
from jaxserve.metrics import Metrics
from jaxserve.server.auth import KeyRing
from jaxserve.server.client import EngineClient
from jaxserve.server.grammars import GrammarChecker
from jaxserve.server.responses.desk import ResponseDesk
from jaxserve.server.seeds import SeedStream
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
    address = new_address(config.server.uds_dir)
    try:
        with contextlib.closing(EngineConnection(address)) as connection, tokenization() as tokens:
            names = model_names(config)
            metrics, siblings = Metrics(names[0]), Siblings(0, 1, folder_of(address))
            client = EngineClient(
                connection,
                metrics,
                max_queued_requests=config.scheduler.max_queued_requests,
                siblings=siblings,
                on_progress=on_progress,
            )
            state = ServerState(
                model_names=names,
                client=client,
                tokenization=tokens,
                metrics=metrics,
                keys=KeyRing(),
                seeds=SeedStream(config.model.seed),
                siblings=siblings,
                limits=config.limits,
                connection=config.connection,
                max_body_size=config.server.max_body_size,
                keep_alive_s=0,
                grammars=GrammarChecker(config.structured),
                responses=ResponseDesk(config.responses, siblings),
            )
            async with (
                contextlib.aclosing(state.grammars),
                running(client.run()),
                _engine(config, address, executor, fake, state),
            ):
                yield state
    finally:
        discard_address(address)


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
        ApiProcess(
            config=config,
            client=state.client,
            tokens=state.tokenization,
            metrics=state.metrics,
            startup=state.startup,
            grammars=state.grammars,
        ).install(tokenizer, path)
        check_tokenizer(tokenizer, await wait_started(state.client, engine), path)
        async with running(_mourn(state.client, engine)):
            yield
    finally:
        await engine.terminate(ENGINE_STOP_TIMEOUT_S)


async def _mourn(client: EngineClient, engine: EngineProcess) -> None:
    await first_of(engine.wait(), client.wait_failed())
    await asyncio.sleep(LAST_WORDS_S)
    client.fail(obituary(engine.returncode))
