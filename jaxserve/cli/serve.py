"""`jaxserve serve`: binds the port, answers HTTP from the first moment, starts the engine, drains at the end.

SIGTERM, SIGINT   `/ready` turns 503, requests under way may finish (`--shutdown-timeout`), the rest ends
                  with an error; a second signal ends everything at once. Exit 0.
engine dies       requests under way end with an error, `/health` turns 503 for a moment. Exit 1.
cannot start      one line on stderr. Exit 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from jaxserve.checkpoint.source import resolve
from jaxserve.cli.options import describe
from jaxserve.cli.progress import StartupDisplay
from jaxserve.config import Config
from jaxserve.engine.launcher import EngineProcess
from jaxserve.engine.spec import EngineSpec
from jaxserve.errors import CheckpointError
from jaxserve.executor.fake import FakeOptions
from jaxserve.ipc.address import discard_address, new_address
from jaxserve.ipc.messages import ModelFacts, StartupProgress
from jaxserve.ipc.transport import EngineConnection
from jaxserve.log import configure_logging
from jaxserve.metrics import Metrics
from jaxserve.server.app import make_app
from jaxserve.server.auth import KeyRing
from jaxserve.server.client import EngineClient
from jaxserve.server.listener import bind_socket, listening
from jaxserve.server.seeds import SeedStream
from jaxserve.server.state import ServerState
from jaxserve.server.tokenization import Tokenization, tokenization
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer

_log = logging.getLogger(__name__)

T = TypeVar("T")

LAST_WORDS_S = 0.2
"""How long messages of a dead engine may still arrive."""
ENGINE_DEATH_GRACE_S = 2.0
"""How long `/health` answers 503 after the engine died, before the process exits."""
ABORT_FLUSH_S = 2.0
"""How long the error events of aborted requests may take to be written."""
ENGINE_STOP_TIMEOUT_S = 5.0


def run_serve(config: Config, *, executor: Literal["local", "fake"] = "local", fake: FakeOptions | None = None) -> int:
    """Serve until told to stop; returns the exit code. Raises StartupError when there is nothing to serve.

    `executor="fake"` runs an engine without a model, for tests of everything around it.
    """
    configure_logging(config.server.log_level)
    with contextlib.closing(bind_socket(config.server.host, config.server.port)) as listener:
        for line in describe(config).splitlines():
            _log.info("%s", line)
        return asyncio.run(_Server(config, listener, executor, fake or FakeOptions()).run())


class _Server:
    """One run of the API process."""

    def __init__(
        self, config: Config, listener: socket.socket, executor: Literal["local", "fake"], fake: FakeOptions
    ) -> None:
        self._config = config
        self._listener = listener
        self._executor: Literal["local", "fake"] = executor
        self._fake = fake
        self._names = _model_names(config)
        self._display = StartupDisplay()
        self._metrics = Metrics(self._names[0])
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> int:
        address = new_address(self._config.server.uds_dir)
        connection = EngineConnection(address)
        client = EngineClient(
            connection,
            self._metrics,
            max_queued_requests=self._config.scheduler.max_queued_requests,
            on_progress=self._display.show,
        )
        try:
            with self._signals(), tokenization() as tokens:
                app = make_app(self._state(client, tokens))
                async with (
                    listening(app, self._listener, max_connections=self._config.server.max_connections),
                    _running(client.run()),
                ):
                    return await self._live(client, tokens, address)
        finally:
            connection.close()
            discard_address(address)

    async def _live(self, client: EngineClient, tokens: Tokenization, address: str) -> int:
        """From the start of the engine to the end of one of the two: it or us."""
        async with (
            _running(self._engine_life(client, tokens, address)) as engine_life,
            _running(self._stop.wait()) as stop,
        ):
            await asyncio.wait({engine_life, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not engine_life.done():
                await self._drain(client, engine_life)
                return 0
            reason = engine_life.result()
            await asyncio.sleep(LAST_WORDS_S)
            client.fail(reason)
            _log.error("%s; exiting", reason)
            await _first_of(self._stop.wait(), asyncio.sleep(ENGINE_DEATH_GRACE_S))
            return 1

    async def _engine_life(self, client: EngineClient, tokens: Tokenization, address: str) -> str:
        """Start the engine, announce it, and wait for its end; returns why it ended. Raises StartupError."""
        with self._display:
            path, tokenizer = await self._find_model(client)
            tokens.install(tokenizer)
            engine = await EngineProcess.start(
                EngineSpec(
                    config=self._config, model_path=str(path), address=address, executor=self._executor, fake=self._fake
                )
            )
            try:
                facts = await self._wait_started(client, engine)
                _check_tokenizer(tokenizer, facts, path)
            except BaseException:
                await engine.terminate(ENGINE_STOP_TIMEOUT_S)
                raise
        print(self._announcement(tokenizer), flush=True)
        try:
            await _first_of(engine.wait(), client.wait_failed())
            return client.ailment() or _obituary(engine.returncode)
        finally:
            await engine.terminate(ENGINE_STOP_TIMEOUT_S)

    async def _find_model(self, client: EngineClient) -> tuple[Path, Tokenizer]:
        model = self._config.model
        path = await self._phase(client, "model", lambda: resolve(model.model, model.revision))
        template = Path(model.chat_template) if model.chat_template is not None else None
        tokenizer = await self._phase(client, "tokenizer", lambda: load_tokenizer(path, chat_template=template))
        return path, tokenizer

    async def _phase(self, client: EngineClient, name: str, work: Callable[[], T]) -> T:
        """A start-up phase of our own, shown and measured like the engine's."""
        started = time.monotonic()
        client.note_progress(StartupProgress(name, 0, 1))
        result = await _in_thread(work)
        client.note_progress(StartupProgress(name, 1, 1))
        self._metrics.set("startup_phase_seconds", time.monotonic() - started, phase=name)
        return result

    async def _wait_started(self, client: EngineClient, engine: EngineProcess) -> ModelFacts:
        await _first_of(client.wait_started(), engine.wait())
        if client.facts is None:
            await asyncio.sleep(LAST_WORDS_S)
            client.fail(f"{_obituary(engine.returncode)} before it was ready")  # unless it said why
        return await client.wait_started()

    async def _drain(self, client: EngineClient, engine_life: asyncio.Task[str]) -> None:
        timeout_s = self._config.server.shutdown_timeout
        _log.info("stopping: %d requests under way may take %g s more", client.num_admitted, timeout_s)
        client.start_draining()
        await _first_of(
            client.wait_idle(), self._stop_now.wait(), asyncio.wait({engine_life}), asyncio.sleep(timeout_s)
        )
        if client.num_admitted:
            _log.warning("aborting %d requests", client.num_admitted)
            client.abort_all("The server is shutting down.")
            await _first_of(client.wait_idle(), asyncio.sleep(ABORT_FLUSH_S))

    def _state(self, client: EngineClient, tokens: Tokenization) -> ServerState:
        server = self._config.server
        return ServerState(
            model_names=self._names,
            client=client,
            tokenization=tokens,
            metrics=self._metrics,
            keys=KeyRing(server.api_key),
            seeds=SeedStream(self._config.model.seed),
            max_body_size=server.max_body_size,
            keep_alive_s=server.sse_keep_alive,
        )

    def _announcement(self, tokenizer: Tokenizer) -> str:
        """The URL and a command to paste, in one line."""
        host, port = self._listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        key = ' -H "Authorization: Bearer $JAXSERVE_API_KEY"' if self._config.server.api_key else ""
        prompt: Any
        if tokenizer.has_chat_template:
            path, name, prompt = "chat/completions", "messages", [{"role": "user", "content": "Hello!"}]
        else:
            path, name, prompt = "completions", "prompt", "Once upon a time"
        data = json.dumps({"model": self._names[0], name: prompt}).replace("'", "'\\''")
        curl = f"curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{data}'"
        return f"jaxserve is ready at {url} - try: {curl}"

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()


def _model_names(config: Config) -> tuple[str, ...]:
    names = [name.strip() for name in (config.model.served_model_name or config.model.model).split(",")]
    return tuple(dict.fromkeys(name for name in names if name)) or (config.model.model,)


def _check_tokenizer(tokenizer: Tokenizer, facts: ModelFacts, path: Path) -> None:
    if tokenizer.max_token_id >= facts.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has ids up to {tokenizer.max_token_id}, the model's embedding has only "
            f"{facts.vocab_size} rows: they do not belong together"
        )


def _obituary(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the engine process was ended by signal {-code}"
    return f"the engine process ended with exit code {code}"


@contextlib.asynccontextmanager
async def _running(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """`work` as a task inside the block; cancelled and waited for at its end. Its own error is the caller's to ask."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _first_of(*works: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of `works` has ended, in whatever way; the others are cancelled."""
    tasks = {asyncio.create_task(work) for work in works}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread: one that hangs on the network must not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast(T, result))

    def run() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (work(), None)
        except BaseException as error:
            outcome = (None, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, *outcome)

    threading.Thread(target=run, daemon=True).start()
    return await done
