"""The server: binds the port, answers HTTP at once, starts the other processes, drains at the end.

upgrade           another process takes the port (`runtime.handover`): running requests may finish (`--upgrade-timeout`),
                  idle connections move to that process. Exit 0.
SIGTERM, SIGINT   `/ready` turns 503, running requests may finish (`--shutdown-timeout`), the rest end
                  with an error; a second signal ends everything at once. Exit 0.
engine dies       running requests end with an error, and another engine is started (`runtime.engine_supervisor`), at
                  most `--engine-restarts` times within 10 minutes; after that as for an API process.
API process dies  its requests end with an error, and it is started again, as often as an engine; after that `/health`
                  answers 503 for 2 s. Exit 1.
cannot start      one line on stderr. Exit 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from jaxserve.checkpoint.source import resolve_model, resolve_tower
from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.http.api_keys import api_keys
from jaxserve.http.event_loop import run_measured
from jaxserve.http.listener import bind_sockets, is_in_use
from jaxserve.http.operations.startup import startup_table
from jaxserve.ipc.address import folder_of, own_address, replica_address
from jaxserve.ipc.engine_spec import EngineSpec, FakeOptions
from jaxserve.ipc.messages import ModelInfo, StartupProgress
from jaxserve.ipc.report import process_start_s
from jaxserve.log import configure_logging, flush_or_drop, line_of
from jaxserve.runtime.api_process import (
    ApiProcess,
    is_loopback,
    receiver_path,
    serving_api,
)
from jaxserve.runtime.api_workers import ApiWorkers, running_workers
from jaxserve.runtime.departure import Departure
from jaxserve.runtime.engine_process import check_tokenizer
from jaxserve.runtime.environment import child_environment
from jaxserve.runtime.handover import Predecessor, predecessor, share_listeners
from jaxserve.runtime.models.model_devices import divide_among_models
from jaxserve.runtime.models.model_runtime import ModelRuntime, install, model_names, tokenizer_of
from jaxserve.runtime.models.model_supervisors import ModelSupervisors
from jaxserve.runtime.notify import notify
from jaxserve.runtime.replacement import Replacement
from jaxserve.runtime.replicas import NextEngine, ReplicaSupervisors
from jaxserve.runtime.settings import describe, describe_changes
from jaxserve.runtime.spawn import Spawned
from jaxserve.runtime.startup_display import StartupDisplay
from jaxserve.runtime.tasks import StopSignals, in_thread, running
from jaxserve.tokenizer.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_OTHER_DESCRIPTORS: Final = 256
"""Upper bound of files that a server opens besides its connections."""
_LEAST_DESCRIPTORS: Final = 32
"""Beside its libraries' files and sockets a server opens the model and takes a few connections."""


@dataclass(frozen=True, slots=True)
class Upgrade:
    """The way in which a server replaces the one that runs."""

    after_drain: bool = False
    """True: start the engine when the running server has ended its own; both never need the device at once."""
    on_done: Callable[[], None] = lambda: None
    """Called when the new server has the port."""


def run_serve(
    config: Config,
    others: Sequence[Config] = (),
    *,
    executor: Literal["local", "fake"] = "local",
    fake: FakeOptions | None = None,
    engine: Spawned | None = None,
    upgrade: Upgrade | None = None,
) -> int:
    """Serve until a signal or a failure; returns the exit code. Raises StartupError if the server cannot start.

    config: settings of the server and of its first model. others: those of further models; the server's are not read.
    executor: "fake" runs an engine without a model, for tests. engine: a process to use instead of a new one. upgrade:
    replace the server that runs at this address instead of binding it.
    """
    configure_logging(config.server.log_level, config.server.log_format)
    allow_connections(config.server.max_connections)
    if not is_loopback(config.server.host) and not api_keys(config.server):
        _log.warning(
            "everybody who reaches %s may use this server: it has no API key (--api-key-file)", config.server.host
        )
    with contextlib.ExitStack() as sockets:
        sockets.callback(flush_or_drop)
        found = None if upgrade is None else sockets.enter_context(predecessor(config.server))
        if found is not None:
            listeners = found.listeners
            _log.info("replacing process %d (jaxserve %s)", found.pid, found.version)
            if upgrade is not None and not upgrade.after_drain:
                check_page_addresses([config, *others])
        else:
            bound = bind_sockets(config.server.host, config.server.port, config.server.api_processes)
            listeners = [sockets.enter_context(listener) for listener in bound]
        _log.info("%s (`jaxserve config` and --log-level debug show all settings)", describe_changes(config))
        for one in (config, *others):
            for line in describe(one).splitlines():
                _log.debug("%s", line)
        server = _Server(
            [config, *others], listeners, executor, fake or FakeOptions(), engine, upgrade or Upgrade(), found
        )
        return run_measured(server.run())


def allow_connections(max_connections: int) -> None:
    """Raise the soft limit to what `max_connections` need, as far as the hard limit allows.

    Shells often set 1024. Without a free descriptor a connection is not refused: it waits in the kernel's queue. Raises
    ConfigError for a limit with which no server starts.
    """
    wanted = max_connections + _NUM_OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if possible < _LEAST_DESCRIPTORS:
        raise ConfigError(
            f"this process may open {possible} files (ulimit -n), a server needs at least {_LEAST_DESCRIPTORS}, and one for "
            "each connection"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    if possible < wanted:
        _log.warning(
            "%d connections (--max-connections) need %d file descriptors, this process may have %d (ulimit -n)",
            max_connections,
            wanted,
            possible,
        )


def check_page_addresses(configs: Sequence[Config]) -> None:
    """Raise ConfigError if an address of --kv-listen is in use, before the model is loaded for an engine that cannot have it."""
    for config in configs:
        for replica in range(config.parallel.replicas):
            address = config.tiers.for_replica(replica).kv_listen or ""
            host, _, port = address.rpartition(":")
            if port.isdigit() and is_in_use(host.removeprefix("[").removesuffix("]"), int(port)):
                raise ConfigError(
                    f"--kv-listen {address}: in use; the engine of the running server keeps its address until it ends, so "
                    "use --after-drain or another port"
                )


@dataclass(slots=True)
class _Server:
    """One run of the first API process, which owns all others."""

    configs: Sequence[Config]
    """The settings of each model; those of the first one hold for the server."""
    listeners: Sequence[socket.socket]
    executor: Literal["local", "fake"]
    fake: FakeOptions
    spawned: Spawned | None
    upgrade: Upgrade
    predecessor: Predecessor | None
    display: StartupDisplay = field(default_factory=StartupDisplay)
    workers: ApiWorkers | None = None

    @property
    def config(self) -> Config:
        return self.configs[0]

    async def run(self) -> int:
        stop = StopSignals(self._pass_on_signal)
        own, is_successor = self._shares()[0], self.predecessor is not None
        with own_address(self.config.server.uds_dir) as address, stop.caught():
            async with serving_api(self.configs, address, own, 0, self.display.show, is_successor=is_successor) as api:
                api.first.startup.own.add("server", process_start_s())
                if (
                    self.config.server.api_key_file or self.config.tls.ssl_certfile
                ):  # else the end of the terminal ends the server
                    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload, api)
                return await self._serve_until_end(api, address, stop)

    async def _serve_until_end(self, api: ApiProcess, address: str, stop: StopSignals) -> int:
        """Start the other processes and wait until one of them or this one ends; returns the exit code."""
        async with running(self._run_others(api, address)) as others_end, running(stop.first.wait()) as stopped:
            await asyncio.wait({others_end, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not others_end.done():
                notify("STOPPING=1")
                await api.drain(stop.second, asyncio.wait({others_end}))
                return 0
            reason = others_end.result()
            if reason is None:
                return 0
            await api.fail(reason, stop.first)
            return 1

    async def _run_others(self, api: ApiProcess, address: str) -> str | None:
        """Start the other processes, announce the server, and wait.

        Returns which process ended; None if another server has the port and all requests have ended. Raises StartupError.
        """
        with contextlib.ExitStack() as display:
            display.enter_context(self.display)
            paths = [await _phase(model, "model", partial(_resolve, model.config)) for model in api.models]
            if self.predecessor is not None and self.upgrade.after_drain:
                await self.predecessor.suspend()
            shares, is_successor = self._shares()[1:], self.predecessor is not None
            workers = ApiWorkers(self.config, paths[0], address, shares)
            supervisors = self._supervisors(api, paths, address, workers.switch_engine)
            async with running(supervisors.run()) as engine_end:
                tokenizers = []
                for model, path in zip(api.models, paths, strict=True):
                    tokenizer = await _phase(model, "tokenizer", partial(tokenizer_of, model.config, path))
                    install(model.frontend, model.config, tokenizer, path)
                    tokenizers.append(tokenizer)
                async with running_workers(workers, is_successor=is_successor):
                    self.workers = workers
                    async with running(_all_ready(api, tokenizers, paths, workers)) as ready:
                        await asyncio.wait({ready, engine_end}, return_when=asyncio.FIRST_COMPLETED)
                        is_started = not engine_end.done()
                        if is_started:
                            supervisors.allow_restarts()
                            display.close()
                            await self._take_port(api, ready.result(), workers, address)
                    timeout_s, num_hosts = self.config.server.upgrade_timeout, self.config.hosts.num_hosts
                    replacement = Replacement(Departure(api), workers, supervisors, timeout_s, num_hosts)
                    async with replacement.offered(self.listeners, folder_of(address)) as left:
                        if is_started:
                            self._announce(tokenizers[0], ready.result()[0])
                        reason = await _first_end(engine_end, workers, left)
                    if reason is not None:
                        api.give_up(reason)  # at once: ending the other processes takes seconds
                        await workers.fail(reason)
                    return reason

    def _shares(self) -> list[list[socket.socket]]:
        """Return the listening sockets of each API process."""
        return share_listeners(self.listeners, self.config.server.api_processes)

    async def _take_port(
        self, api: ApiProcess, model_infos: Sequence[ModelInfo], workers: ApiWorkers, address: str
    ) -> None:
        """Accept connections in place of the server that runs, if this one replaces it, and report readiness."""
        for model, model_info in zip(api.models, model_infos, strict=True):
            headline, *table = startup_table(model.record_start(model_info), model_info.startup)
            _log.info("%s%s", model.label, headline)
            for line in table:
                _log.debug("%s", line)
        if self.predecessor is None:
            notify("READY=1")
            return
        api.http.start_accepting()
        api.take_operator_socket()
        await workers.accept()
        notify(f"MAINPID={os.getpid()}\nREADY=1")
        folder = folder_of(address)
        receivers = [str(receiver_path(folder, index)) for index in range(self.config.server.api_processes)]
        await self.predecessor.take_over(receivers)
        _log.info("serving in place of process %d, which finishes its requests", self.predecessor.pid)
        self.upgrade.on_done()

    def _supervisors(
        self, api: ApiProcess, paths: Sequence[Path], address: str, on_next: NextEngine
    ) -> ModelSupervisors:
        supervisors = []
        shares = divide_among_models(self.configs, child_environment())
        for number, (model, path, share) in enumerate(zip(api.models, paths, shares, strict=True)):
            spec = EngineSpec(
                config=share.config,
                model_path=str(path),
                address=replica_address(address, number),
                executor=self.executor,
                fake=self.fake,
                publishes_pages=share.config.cache.publish_pages,
                phases=model.startup.own.take(),
            )
            process = None if number else self.spawned
            supervisors.append(ReplicaSupervisors(model, spec, process, on_next, share.devices))
        return ModelSupervisors(api.models, supervisors)

    def _reload(self, api: ApiProcess) -> None:
        """Read API keys and certificate again, here and in the other API processes."""
        api.reload()
        if self.workers is not None:
            self.workers.reload()

    def _pass_on_signal(self) -> None:
        if self.workers is not None:
            self.workers.terminate()

    def _announce(self, tokenizer: Tokenizer, model_info: ModelInfo) -> None:
        """Print the URL and a command to paste, in one line."""
        host, port = self.listeners[0].getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        scheme = "http" if self.config.tls.ssl_certfile is None else "https"
        url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        key = ' -H "Authorization: Bearer $JAXSERVE_API_KEY"' if api_keys(self.config.server) else ""
        path, fields = first_request(model_info, has_chat=bool(tokenizer.chat_templates))
        data = json.dumps({"model": model_names(self.config)[0], **fields}).replace("'", "'\\''")
        curl = f"curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{data}'"
        line = line_of(f"jaxserve is ready at {url} - try: {curl}")
        with contextlib.suppress(OSError):  # a closed stdout is no reason to stop, now or in a last flush
            os.write(sys.stdout.fileno(), f"{line}\n".encode())


def first_request(model_info: ModelInfo, *, has_chat: bool) -> tuple[str, dict[str, Any]]:
    """Return the path and the fields of a request that the model takes, beside its name."""
    text = "Once upon a time"
    if model_info.embedding is not None and model_info.embedding.scores_pairs:
        return "rerank", {"query": "How do stories begin?", "documents": [text, "The end"]}
    if model_info.embedding is not None and model_info.embedding.labels:
        return "classify", {"input": text}
    if model_info.embedding is not None:
        return "embeddings", {"input": text}
    if has_chat:
        return "chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
    return "completions", {"prompt": text}


def _resolve(config: Config) -> Path:
    path = resolve_model(config.model)
    resolve_tower(config.images, progress=True)  # fetched here, with a bar
    return path


async def _phase(model: ModelRuntime, name: str, work: Callable[[], T]) -> T:
    """Run a start-up phase of this process, shown and measured like the engine's phases."""
    started = time.monotonic()
    model.client.engines.note_progress(StartupProgress(name, 0, 1))
    result = await in_thread(work)
    model.client.engines.note_progress(StartupProgress(name, 1, 1))
    model.startup.own.add(name, started)
    return result


async def _all_ready(
    api: ApiProcess, tokenizers: Sequence[Tokenizer], paths: Sequence[Path], workers: ApiWorkers
) -> list[ModelInfo]:
    """Wait until engines and API processes accept requests. Raises StartupError."""
    model_infos = []
    for model, tokenizer, path in zip(api.models, tokenizers, paths, strict=True):
        model_infos.append(await model.client.wait_started())
        check_tokenizer(tokenizer, model_infos[-1], path)
        await model.client.engines.all_started.wait()
    await workers.wait_ready()
    return model_infos


async def _first_end(engine_end: asyncio.Task[str], workers: ApiWorkers, left: asyncio.Task[None]) -> str | None:
    """Wait until the engine or one of the workers has ended for good; returns what happened, None if all was left in order."""
    async with running(workers.supervise()) as worker_end:
        await asyncio.wait({engine_end, worker_end, left}, return_when=asyncio.FIRST_COMPLETED)
        if left.done():
            left.result()
            return None
        return (engine_end if engine_end.done() else worker_end).result()
