"""One model of an API process: its settings, its frontend, and the record of its engine's start."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.frontend.adapters import AdapterNames
from jaxserve.frontend.engine_client.client import EngineClient
from jaxserve.frontend.engine_client.connection import EngineConnection
from jaxserve.frontend.frontend import Frontend
from jaxserve.frontend.grammar_checker import GrammarChecker
from jaxserve.frontend.images.loader import ImageLoader
from jaxserve.frontend.parsers.output_format import choose_output_format
from jaxserve.frontend.peers import PeerProcesses
from jaxserve.frontend.reply_budget import ReplyBudget
from jaxserve.frontend.sampling import SeedStream
from jaxserve.frontend.tokenization import Tokenization
from jaxserve.http.operations.startup import StartupLog, total_seconds
from jaxserve.ipc.messages import ModelInfo, StartupProgress
from jaxserve.ipc.report import PhaseSpan
from jaxserve.ipc.transport import ClientSocket
from jaxserve.metrics import Metrics
from jaxserve.routing.router import make_policy
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelRuntime:
    """A model that is served; its engines come and go."""

    config: Config
    frontend: Frontend
    startup: StartupLog
    label: str = ""
    """Start of each line of the log about this model: its name and a colon, or nothing if it is the only one."""

    @property
    def client(self) -> EngineClient:
        return self.frontend.client

    @contextlib.asynccontextmanager
    async def connected(self, address: str, replica: int = 0) -> AsyncIterator[EngineConnection]:
        """Connect to the engine that listens at `address`, for the block. After it the next engine's start-up is recorded anew."""
        with contextlib.closing(ClientSocket(address)) as socket:
            async with self.client.connected(socket, replica) as connection:
                yield connection
        if not self.client.engines.connections:
            self.startup.begin_again()

    def record_start(self, model_info: ModelInfo, replica: int = 0) -> list[PhaseSpan]:
        """Set the start-up metrics of a replica; returns all phases of its start."""
        spans = model_info.startup.phases if replica else self.startup.spans(model_info.startup)
        metrics = self.frontend.metrics.of_engine(replica)
        for span in spans:
            metrics.set("startup_phase_seconds", span.seconds, phase=span.phase)
        metrics.set("startup_phase_seconds", total_seconds(spans), phase="total")
        for source, number in Counter(program.source for program in model_info.startup.programs).items():
            metrics.set("startup_programs", number, source=source)
        return spans


def make_frontend(
    config: Config,
    peers: PeerProcesses,
    tokens: Tokenization,
    on_progress: Callable[[StartupProgress], None],
    first: Frontend | None = None,
) -> Frontend:
    """Return the frontend of the config. Its caller connects the client to an engine and closes the grammar checker.

    first: the frontend of the server's first model, whose registry of metrics and memory of replies this one shares.
    """
    names, adapters = model_names(config), config.model.adapters
    if both := adapters.keys() & set(names):
        raise ConfigError(f"--lora-modules: {min(both)!r} is the name of the model itself")
    loaded = AdapterNames(adapters)
    new_metrics = Metrics if first is None else first.metrics.of_model
    metrics = new_metrics(names[0], adapters=tuple(adapters), max_adapters=config.model.num_adapter_places)
    return Frontend(
        model_names=names,
        adapters=loaded,
        client=EngineClient(
            metrics,
            max_queued_requests=config.scheduler.max_queued_requests,
            max_queued_tokens=config.scheduler.max_queued_tokens,
            stall_timeout_s=config.server.stall_timeout,
            startup_timeout_s=config.server.startup_timeout,
            peers=peers,
            on_progress=on_progress,
            num_replicas=config.parallel.replicas,
            adapters=loaded,
            policy=make_policy(config.parallel.routing, max_imbalance_tokens=config.parallel.max_imbalance_tokens),
        ),
        tokenization=tokens,
        metrics=metrics,
        seeds=SeedStream(config.model.seed, peers.index, peers.count),
        grammars=GrammarChecker(config.structured),
        limits=config.limits,
        images=ImageLoader(config.images),
        replies=first.replies if first else ReplyBudget(peers.share_of(config.memory.max_reply_memory)),
    )


def install(frontend: Frontend, config: Config, tokenizer: Tokenizer, path: Path) -> None:
    """Install the model's tokenizer and output format. Raises ConfigError for parsers that do not go together."""
    templates = tokenizer.chat_templates
    output_format = choose_output_format(
        templates.sources,
        config.server.tool_call_parser,
        config.server.reasoning_parser,
        takes_tools=templates.take_tools,
    )
    generic = " (the chat template has no known place for tools: the system message explains them)"
    _log.info("%s%s", output_format, generic if output_format.explains_tools else "")
    frontend.tokenization.install(tokenizer, output_format)
    frontend.grammars.install(str(path))
    frontend.images.install(path)


def model_names(config: Config) -> tuple[str, ...]:
    """Return the names that requests may use; replies have the first one. Raises ConfigError if the setting has none."""
    given = config.model.served_model_name
    if given is None:
        return (config.model.model,)
    names = tuple(dict.fromkeys(name for part in given.split(",") if (name := part.strip())))
    if not names:
        raise ConfigError(f"--served-model-name {given!r}: expected names, separated by commas, found none")
    return names


def tokenizer_of(config: Config, path: Path) -> Tokenizer:
    """Load the tokenizer of the model at `path`, with the chat template of the config, if any."""
    template = config.model.chat_template
    return load_tokenizer(path, chat_template=Path(template) if template is not None else None)
