"""A real application on a real socket, with an engine whose every message the test decides."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession

from jaxserve.apis.responses.service import ResponseService
from jaxserve.config import ConnectionConfig, LimitsConfig, ResponsesConfig, StructuredConfig
from jaxserve.frontend.adapters import AdapterNames
from jaxserve.frontend.engine_client.client import EngineClient
from jaxserve.frontend.engine_client.connection import EngineConnection
from jaxserve.frontend.frontend import Frontend, ServedModels
from jaxserve.frontend.grammar_checker import GrammarChecker
from jaxserve.frontend.images.loader import ImageLoader
from jaxserve.frontend.parsers.output_format import OutputFormat
from jaxserve.frontend.peers import PeerProcesses
from jaxserve.frontend.reply_budget import ReplyBudget
from jaxserve.frontend.sampling import SeedStream
from jaxserve.frontend.tokenization import tokenization
from jaxserve.http.access import CorsPolicy, KeyRing
from jaxserve.http.app import make_app
from jaxserve.http.body_budget import BodyBudget
from jaxserve.http.listener import bind_sockets, listening
from jaxserve.http.operations.startup import StartupLog
from jaxserve.http.state import ServerState
from jaxserve.http.tracing import Tracing
from jaxserve.ipc.messages import (
    Abort,
    AddRequest,
    ErrorInfo,
    FromEngine,
    Hello,
    ModelInfo,
    Ready,
    RequestOutput,
    StartupProgress,
    StepOutputs,
    ToEngine,
    TokenLogprobs,
)
from jaxserve.ipc.prompt_embeds import PromptEmbedsInfo
from jaxserve.ipc.routed_experts import RoutedExpertsInfo
from jaxserve.metrics import Metrics
from jaxserve.tenants import KeyRecord, Tenant
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from jaxserve.types import RequestId

TOKENIZERS = Path(__file__).parents[1] / "fixtures" / "tokenizers"
MAX_MODEL_LEN = 64
MAX_BODY_SIZE = 16 << 10
MAX_QUEUED_REQUESTS = 5
ALONE = PeerProcesses(0, 1, Path())

MODEL_INFO = ModelInfo(
    vocab_size=400,
    max_model_len=MAX_MODEL_LEN,
    num_kv_blocks=16,
    block_size=16,
    max_num_seqs=3,
    kv_dtype="float32",
    platform="test",
    num_devices=1,
    fingerprint="0123abcd",
)


@dataclass
class ScriptedEngine:
    """The other end of the connection: records messages, and sends those of the test, and the ends of aborted requests."""

    is_frozen: bool = False
    """True: aborts are not answered."""
    aborted: list[RequestId] = field(default_factory=list)
    said_hello: bool = False
    marks: asyncio.Queue[StartupProgress] = field(default_factory=asyncio.Queue)
    _added: asyncio.Queue[AddRequest] = field(default_factory=asyncio.Queue)
    _aborts: asyncio.Queue[RequestId] = field(default_factory=asyncio.Queue)
    _outputs: asyncio.Queue[FromEngine] = field(default_factory=asyncio.Queue)

    async def send(self, message: ToEngine) -> None:
        if isinstance(message, AddRequest):
            self._added.put_nowait(message)
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self.aborted.append(request_id)
                self._aborts.put_nowait(request_id)
                if not self.is_frozen:
                    self.say(StepOutputs([RequestOutput(request_id, [], finish_reason="abort")]))
        elif isinstance(message, Hello):
            self.said_hello = True

    async def receive(self) -> FromEngine:
        return await self._outputs.get()

    def say(self, message: FromEngine) -> None:
        self._outputs.put_nowait(message)

    def output(self, request: AddRequest, token_ids: list[int], **fields: Any) -> None:
        """Send the output of one step for one request; scores every token -1 - its place when they were asked for."""
        num_top = request.sampling.num_top_logprobs
        if num_top is not None and "logprobs" not in fields:
            fields["logprobs"] = [
                TokenLogprobs(-1.0, [token_id, *range(num_top)][:num_top], [-1.0 - i for i in range(num_top)])
                for token_id in token_ids
            ]
        num_prompt = request.sampling.num_prompt_logprobs
        if num_prompt is not None and token_ids:
            fields["prompt_logprobs"] = [
                TokenLogprobs(-0.5 * i, list(range(num_prompt)), [-1.0 - k for k in range(num_prompt)], i + 7)
                for i in range(1, len(request.prompt_token_ids))
            ]
        self.say(StepOutputs([RequestOutput(request.request_id, token_ids, **fields)]))

    def refuse(self, request: AddRequest, error_class: str, message: str, **fields: Any) -> None:
        error = ErrorInfo(error_class, message, **fields)
        self.say(StepOutputs([RequestOutput(request.request_id, [], finish_reason="error", error=error)]))

    async def is_heard(self) -> None:
        """Wait until the client has taken in all that was said so far."""
        self.say(StartupProgress("mark", 1, 1))
        await asyncio.wait_for(self.marks.get(), 60)

    async def added(self) -> AddRequest:
        """The next request that was submitted."""
        return await asyncio.wait_for(self._added.get(), 60)

    async def was_aborted(self) -> RequestId:
        """The next request that was aborted."""
        return await asyncio.wait_for(self._aborts.get(), 60)


@dataclass(frozen=True)
class Api:
    """One running API process in miniature."""

    http: ClientSession
    engine: ScriptedEngine
    client: EngineClient
    connection: EngineConnection
    exit_stack: contextlib.AsyncExitStack
    """The connection of `engine`: closing it ends it."""
    metrics: Metrics
    tokenizer: Tokenizer
    responses: ResponseService
    port: int
    bodies: BodyBudget
    replies: ReplyBudget
    images: ImageLoader
    adapters: AdapterNames

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Status and JSON of a POST."""
        if body is not None:
            options["json"] = body
        async with self.http.post(path, **options) as response:
            return response.status, await response.json()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TOKENIZERS / "byte_level")


def records_of(api_key: str | None) -> list[KeyRecord]:
    """Return the records of a value of --api-key."""
    return [KeyRecord(key=key) for key in api_key.split(",")] if api_key else []


@contextlib.asynccontextmanager
async def running_api(
    tokenizer: Tokenizer,
    *,
    api_key: str | None = None,
    is_ready: bool = True,
    keep_alive_s: float = 15.0,
    max_connections: int = 100,
    max_model_len: int = MAX_MODEL_LEN,
    output_format: OutputFormat | None = None,
    responses: ResponsesConfig | None = None,
    connection: ConnectionConfig | None = None,
    is_strict: bool = False,
    has_page: bool = False,
    max_queued_tokens: int | None = None,
    cors_allowed_origins: str | None = None,
    adapters: dict[str, str] | None = None,
    records: Sequence[KeyRecord] = (),
    allows_commands: bool = True,
    is_local: bool = False,
    max_body_memory: int | None = None,
    max_reply_memory: int | None = None,
    tracing: Tracing | None = None,
    logs_access: bool = False,
    others: Mapping[str, ScriptedEngine] = MappingProxyType({}),
    max_body_size: int = MAX_BODY_SIZE,
    num_replicas: int = 1,
    prompt_embeds: PromptEmbedsInfo | None = None,
    routed_experts: RoutedExpertsInfo | None = None,
) -> AsyncIterator[Api]:
    """Run an application with the model `tiny`, and with those of `others`, whose engines report nothing by themselves."""
    engine = ScriptedEngine()
    startup = StartupLog()

    def note(progress: StartupProgress) -> None:
        startup.note(progress)
        engine.marks.put_nowait(progress)

    metrics = Metrics("tiny")
    client = EngineClient(
        metrics,
        max_queued_requests=MAX_QUEUED_REQUESTS,
        max_queued_tokens=max_queued_tokens,
        stall_timeout_s=60.0,
        peers=ALONE,
        on_progress=note,
        num_replicas=num_replicas,
    )
    with tokenization() as tokens:
        tokens.install(tokenizer, output_format or OutputFormat())
        frontend = Frontend(
            model_names=("tiny", "alias"),
            adapters=AdapterNames(adapters),
            client=client,
            tokenization=tokens,
            metrics=metrics,
            seeds=SeedStream(0),
            grammars=GrammarChecker(StructuredConfig()),
            limits=LimitsConfig(),
            replies=ReplyBudget(max_reply_memory),
        )
        further = [further_model(frontend, name) for name in others]
        state = ServerState(
            models=ServedModels([frontend, *further]),
            startups={"tiny": startup, **{name: StartupLog() for name in others}},
            keys=KeyRing([Tenant(record, metrics) for record in (*records_of(api_key), *records)]),
            allows_commands=allows_commands,
            is_local=is_local,
            bodies=BodyBudget(max_body_memory),
            peers=ALONE,
            connection=connection or ConnectionConfig(),
            is_strict=is_strict,
            has_page=has_page,
            cors=CorsPolicy(cors_allowed_origins),
            max_body_size=max_body_size,
            keep_alive_s=keep_alive_s,
            tracing=tracing,
            logs_access=logs_access,
            responses=ResponseService(responses or ResponsesConfig(), ALONE),
        )
        async with contextlib.AsyncExitStack() as exit_stack:
            engine_connection = await exit_stack.enter_async_context(client.connected(engine))
            for model, other in zip(further, others.values(), strict=True):
                await exit_stack.enter_async_context(model.client.connected(other))
            if is_ready:
                info = msgspec.structs.replace(
                    MODEL_INFO, max_model_len=max_model_len, prompt_embeds=prompt_embeds, routed_experts=routed_experts
                )
                engine.say(Ready(info))
                await client.wait_started()
            with bind_sockets("127.0.0.1", 0, 1)[0] as listener:
                port = listener.getsockname()[1]
                async with (
                    listening(
                        make_app(state),
                        [listener],
                        state.connection,
                        max_connections=max_connections,
                        on_surplus=partial(metrics.inc, "surplus_connections"),
                    ),
                    ClientSession(f"http://127.0.0.1:{port}/") as http,
                ):
                    yield Api(
                        http,
                        engine,
                        client,
                        engine_connection,
                        exit_stack,
                        metrics,
                        tokenizer,
                        state.responses,
                        port,
                        state.bodies,
                        frontend.replies,
                        frontend.images,
                        frontend.adapters,
                    )


def further_model(first: Frontend, name: str) -> Frontend:
    """Return the frontend of another model of the server, with the same tokenizer."""
    metrics = first.metrics.of_model(name)
    client = EngineClient(metrics, max_queued_requests=MAX_QUEUED_REQUESTS, stall_timeout_s=60.0, peers=ALONE)
    return replace(first, model_names=(name,), adapters=AdapterNames(), client=client, metrics=metrics)


@pytest.fixture
async def api(tokenizer: Tokenizer) -> AsyncIterator[Api]:
    async with running_api(tokenizer) as running:
        yield running


@pytest.fixture
def messages() -> list[dict[str, str]]:
    return [{"role": "user", "content": "Hi"}]
