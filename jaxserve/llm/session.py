"""The engine of one LLM: its process, and the frontend that requests use."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Literal

from jaxserve.checkpoint.source import resolve
from jaxserve.config import Config
from jaxserve.frontend.engine_client.client import EngineClient
from jaxserve.frontend.engine_client.connection import EngineConnection
from jaxserve.frontend.frontend import Frontend
from jaxserve.frontend.peers import PeerProcesses
from jaxserve.frontend.tokenization import tokenization
from jaxserve.ipc.address import folder_of, own_address
from jaxserve.ipc.engine_spec import EngineSpec, FakeOptions
from jaxserve.ipc.messages import StartupProgress
from jaxserve.ipc.transport import ClientSocket
from jaxserve.runtime.api_process import install, make_frontend, tokenizer_of
from jaxserve.runtime.engine_process import EngineProcess, check_tokenizer, engine_process, wait_dead, wait_started
from jaxserve.runtime.tasks import in_thread, running


@contextlib.asynccontextmanager
async def engine_session(
    config: Config,
    executor: Literal["local", "fake"],
    fake: FakeOptions,
    on_progress: Callable[[StartupProgress], None],
) -> AsyncIterator[Frontend]:
    """Yield the frontend of an engine that is ready: a server without a port."""
    with own_address(config.server.uds_dir) as address, tokenization() as tokens:
        frontend = make_frontend(config, PeerProcesses(0, 1, folder_of(address)), tokens, on_progress)
        async with contextlib.aclosing(frontend.grammars), _engine(config, address, executor, fake, frontend):
            yield frontend


@contextlib.asynccontextmanager
async def _engine(
    config: Config, address: str, executor: Literal["local", "fake"], fake: FakeOptions, frontend: Frontend
) -> AsyncIterator[None]:
    """Run the engine process inside the block; requests under way end with an error if it ends."""
    path = await in_thread(lambda: resolve(config.model.model, config.model.revision))
    spec = EngineSpec(config=config, model_path=str(path), address=address, executor=executor, fake=fake)
    with contextlib.closing(ClientSocket(address)) as socket:
        async with frontend.client.connected(socket) as connection, engine_process(spec) as engine:
            tokenizer = await in_thread(lambda: tokenizer_of(config, path))
            install(frontend, config, tokenizer, path)
            check_tokenizer(tokenizer, await wait_started(connection, engine), path)
            async with running(_fail_at_end(frontend.client, connection, engine)):
                yield


async def _fail_at_end(client: EngineClient, connection: EngineConnection, engine: EngineProcess) -> None:
    client.fail(await wait_dead(connection, engine))
