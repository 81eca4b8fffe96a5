"""The parts of an API process: the HTTP application on one side, the connection to the engine on the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from jaxserve.apis.responses.service import ResponseService
from jaxserve.config import Config, ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.frontend.frontend import ServedModels
from jaxserve.frontend.peers import PeerProcesses
from jaxserve.frontend.tokenization import tokenization
from jaxserve.http.access import CorsPolicy, KeyRing
from jaxserve.http.api_keys import key_records, make_tenants
from jaxserve.http.app import make_app
from jaxserve.http.body_budget import BodyBudget
from jaxserve.http.event_loop import MeasuredLoop
from jaxserve.http.listener import HttpServer, listening
from jaxserve.http.operations.startup import StartupLog
from jaxserve.http.sockets.operator_socket import OperatorSocket, operator_socket
from jaxserve.http.sockets.tls import file_changes, tls_context
from jaxserve.http.sockets.transfer import receiving
from jaxserve.http.state import ServerState
from jaxserve.http.tracing import Tracing, open_tracing
from jaxserve.ipc.address import folder_of
from jaxserve.ipc.messages import StartupProgress
from jaxserve.runtime.models.model_runtime import ModelRuntime, make_frontend, model_names
from jaxserve.runtime.tasks import first_of, in_thread, running
from jaxserve.tenants import KeyRecord, Tenant

_log = logging.getLogger(__name__)

ShowProgress = Callable[[StartupProgress, str], None]
"""Shows the progress of the start of a model, whose label is the second argument."""

ABORT_FLUSH_S: Final = 2.0
"""Time for writing the error events of aborted requests."""
TRACES_FLUSH_S: Final = 5.0
"""Time for sending the last traces."""
WATCH_S: Final = 0.25
"""Time between two measurements of the event loop."""
DEATH_GRACE_S: Final = 2.0
"""Time in which `/health` and `/live` answer 503 between the end of the engine and the exit of the process."""


@dataclass(frozen=True, slots=True)
class ApiProcess:
    """One running API process."""

    config: Config
    """Settings of the server, and of the first model."""
    models: tuple[ModelRuntime, ...]
    http: HttpServer
    keys: KeyRing
    operators: OperatorSocket | None
    rereads_certificate: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to have certificate and authorities read again."""

    @property
    def first(self) -> ModelRuntime:
        """The first model; the only one unless several are served."""
        return self.models[0]

    @property
    def num_sequences(self) -> int:
        """Sequences of all models that run or wait."""
        return sum(model.client.admission.num_sequences for model in self.models)

    async def wait_idle(self) -> None:
        """Wait until no request for any model runs or waits."""
        while self.num_sequences:
            await asyncio.gather(*(model.client.admission.wait_idle() for model in self.models))

    def reload(self) -> None:
        """Read the API keys, the certificate and its authorities again."""
        self._reload_keys()
        self.rereads_certificate.set()

    async def follow_certificate(self) -> None:
        """Read certificate and authorities again each time that one of their files changes, and on `reload`."""
        if self.config.tls.ssl_certfile is not None:
            async for _ in file_changes(self.config.tls, self.rereads_certificate):
                await self._reload_certificate()

    async def _reload_certificate(self) -> None:
        """Use the certificate for new connections. The old one stays if the files cannot be read, or do not fit together."""
        try:
            context = tls_context(self.config.tls)
        except ConfigError as error:
            _log.error("the certificate is not read again: %s", error)
            return
        if context is not None:
            self.http.replace_tls(context)
            _log.info("new connections get the certificate that %s has now", self.config.tls.ssl_certfile)

    def _reload_keys(self) -> None:
        """Read the API keys again. The old ones stay if that fails, or if there were none."""
        try:
            records = key_records(self.config.server)
        except ConfigError as error:
            _log.error("the API keys are not read again: %s", error)
            return
        if records:
            self.keys.replace(self._tenants(records))
            for model in self.models:
                model.client.admission.has_several_keys = self.keys.has_several_names
            _log.info("%d API keys are accepted from now on", len(records))

    def _tenants(self, records: Sequence[KeyRecord]) -> list[Tenant]:
        return make_tenants(records, self.config, self.first.frontend.metrics)

    def take_operator_socket(self) -> None:
        """Take the path of --admin-socket from the server that this one replaces."""
        if self.operators is None:
            return
        try:
            self.operators.publish()
        except OSError as error:
            _log.error("--admin-socket %s: %s", self.config.server.admin_socket, error.strerror)

    async def drain(self, stop_now: asyncio.Event, engine_gone: Coroutine[Any, Any, Any]) -> None:
        """Refuse new requests, let running ones finish within `--shutdown-timeout`, and end the rest with an error."""
        timeout_s = self.config.server.shutdown_timeout
        _log.info("stopping: %d running requests may take %g s more", self.num_sequences, timeout_s)
        for model in self.models:
            model.client.start_draining()
        await first_of(self.wait_idle(), stop_now.wait(), engine_gone, asyncio.sleep(timeout_s))
        await self.abort_all()

    async def abort_all(self) -> None:
        """End the requests that still run with an error."""
        if self.num_sequences:
            _log.warning("aborting %d requests", self.num_sequences)
            for model in self.models:
                model.client.engines.abort_all("The server is shutting down.")
            await first_of(self.wait_idle(), asyncio.sleep(ABORT_FLUSH_S))

    def give_up(self, reason: str) -> None:
        """Expect no further engine of any model: running requests end with an error."""
        for model in self.models:
            model.client.fail(reason)

    async def fail(self, reason: str, stop: asyncio.Event) -> None:
        """End every request with an error, and let `/health` and `/live` answer 503 until `stop` or the grace period ends.

        Returns after all errors were sent, or after `ABORT_FLUSH_S` more.
        """
        self.give_up(reason)
        _log.error("%s; exiting", reason)
        await first_of(stop.wait(), asyncio.sleep(DEATH_GRACE_S))
        await first_of(self.wait_idle(), asyncio.sleep(ABORT_FLUSH_S))


@contextlib.asynccontextmanager
async def serving_api(
    configs: Sequence[Config],
    address: str,
    listeners: Sequence[socket.socket],
    index: int,
    on_progress: ShowProgress = lambda progress, label: None,
    *,
    is_successor: bool = False,
    is_replacement: bool = False,
) -> AsyncIterator[ApiProcess]:
    """Run API process `index` of `--api-processes`: it answers on `listeners` inside the block.

    Until a tokenizer is installed and the engine is ready, requests are refused as "loading".
    address: of the first engine. The sockets between API processes are in the same directory.
    is_successor: accept nothing until `http.start_accepting`, and take idle connections of the process that serves now.
    is_replacement: accept nothing until then, either; the process that served before is dead.
    """
    config = configs[0]
    peers = PeerProcesses(index, config.server.api_processes, folder_of(address))
    path = None if index else config.server.admin_socket
    with contextlib.ExitStack() as pools, operator_socket(path, is_successor=is_successor) as operators:
        models = _make_models(configs, peers, pools, on_progress)
        state = _server_state(models, config, peers)
        metrics = state.models.first.metrics
        http = listening(
            make_app(state),
            [*listeners, *([] if operators is None else [operators.listener])],
            config.connection,
            max_connections=peers.share_of(config.server.max_connections),
            on_surplus=partial(metrics.inc, "surplus_connections"),
            is_accepting=not (is_successor or is_replacement),
            tls=tls_context(config.tls),
        )
        async with (
            _closing(state.tracing),
            _closing_models(models),
            contextlib.aclosing(state.responses),
            peers.answering(metrics, state.responses.answers),
            http as http_server,
            contextlib.AsyncExitStack() as receivers,
            running(_watch_loop(models, http_server, state.bodies)),
        ):
            if is_successor:
                receiver = receiver_path(folder_of(address), index)
                await receivers.enter_async_context(receiving(receiver, http_server.adopt))
            api = ApiProcess(config, models, http_server, state.keys, operators)
            async with running(api.follow_certificate()):
                yield api


@contextlib.asynccontextmanager
async def _closing(tracing: Tracing | None) -> AsyncIterator[None]:
    """Send the traces that are left after the block; a collector that does not answer is not awaited for long."""
    try:
        yield
    finally:
        if tracing is not None:
            await first_of(in_thread(tracing.close), asyncio.sleep(TRACES_FLUSH_S))


@contextlib.asynccontextmanager
async def _closing_models(models: Sequence[ModelRuntime]) -> AsyncIterator[None]:
    """End the processes that frontends have started, after the block."""
    async with contextlib.AsyncExitStack() as stack:
        for model in models:
            await stack.enter_async_context(contextlib.aclosing(model.frontend.grammars))
            await stack.enter_async_context(contextlib.aclosing(model.frontend.images))
        yield


def _make_models(
    configs: Sequence[Config], peers: PeerProcesses, pools: contextlib.ExitStack, on_progress: ShowProgress
) -> tuple[ModelRuntime, ...]:
    """Return the models of `configs`. Raises ConfigError if two have a name in common. pools: ends their threads."""
    models: list[ModelRuntime] = []
    for config in configs:
        startup, label = StartupLog(), f"{model_names(config)[0]}: " if len(configs) > 1 else ""

        def note(progress: StartupProgress, startup: StartupLog = startup, label: str = label) -> None:
            startup.note(progress)
            on_progress(progress, label)

        first = models[0].frontend if models else None
        frontend = make_frontend(config, peers, pools.enter_context(tokenization()), note, first)
        models.append(ModelRuntime(config, frontend, startup, label))
    counts = Counter(name for model in models for name in model.frontend.names)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(f"two models or adapters have the name {twice[0]!r} (--model, --lora-modules)")
    return tuple(models)


def _server_state(models: Sequence[ModelRuntime], config: Config, peers: PeerProcesses) -> ServerState:
    """Return the state of the HTTP side. Raises ConfigError for keys that cannot be read."""
    server = config.server
    records = key_records(server)
    keys = KeyRing(make_tenants(records, config, models[0].frontend.metrics))
    for model in models:
        model.client.admission.has_several_keys = keys.has_several_names
    return ServerState(
        models=ServedModels([model.frontend for model in models]),
        startups={model.frontend.model_name: model.startup for model in models},
        keys=keys,
        allows_commands=server.public_commands or (is_local(server) and not records),
        is_local=is_local(server),
        logs_access=server.access_log,
        bodies=BodyBudget(peers.share_of(server.max_body_memory)),
        peers=peers,
        responses=ResponseService(config.responses, peers),
        connection=config.connection,
        is_strict=server.strict_parameters,
        has_page=server.ui,
        has_public_metrics=server.public_metrics,
        allows_weight_updates=server.allow_weight_updates,
        cors=CorsPolicy(server.cors_allowed_origins),
        max_body_size=server.max_body_size,
        keep_alive_s=server.sse_keep_alive,
        tracing=open_tracing(server.otlp_traces_endpoint),
    )


def receiver_path(folder: Path, index: int) -> Path:
    """Return the socket at which API process `index` takes connections of another server process."""
    return folder / f"connections-{index}.sock"


def is_local(server: ServerConfig) -> bool:
    """Return True if requests come from this host only."""
    return is_loopback(server.host) and not server.behind_proxy


def is_loopback(host: str) -> bool:
    """Return True for an address that only this host reaches."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name: it may resolve to anything
        return False


async def _watch_loop(models: Sequence[ModelRuntime], http: HttpServer, bodies: BodyBudget) -> None:
    """Measure how late the event loop runs a timer, and the gauges of this process."""
    loop, first = asyncio.get_running_loop(), models[0].frontend
    metrics = first.metrics
    num_long = 0
    while True:
        due_s = loop.time() + WATCH_S
        await asyncio.sleep(WATCH_S)
        metrics.observe("event_loop_lag_seconds", max(0.0, loop.time() - due_s))
        if isinstance(loop, MeasuredLoop):
            metrics.set("event_loop_longest_turn_seconds", loop.turns.end_period())
            metrics.inc("event_loop_long_turns", loop.turns.num_long - num_long)
            num_long = loop.turns.num_long
        metrics.set("reply_bytes", first.replies.num_bytes)
        metrics.set("http_connections", http.num_connections)
        metrics.set("body_bytes", bodies.num_bytes)
        for model in models:
            client, own = model.client, model.frontend.metrics
            own.set("queued_prompt_tokens", client.engines.num_waiting_tokens)
            own.set("request_capacity", client.admission.max_sequences if client.is_ready else 0)
