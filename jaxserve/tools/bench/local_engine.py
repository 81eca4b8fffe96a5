"""The engine of `jaxserve bench offline`: loaded in this process, with the settings that a server gives it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from jaxserve.checkpoint.source import resolve
from jaxserve.config import Config
from jaxserve.engine.process import build_core, build_executor
from jaxserve.errors import ConfigError, RequestError
from jaxserve.frontend.grammar import constraint_grammar
from jaxserve.frontend.request import StructuredOutputs, chosen_constraint
from jaxserve.ipc.engine_spec import EngineSpec
from jaxserve.ipc.messages import Grammar, StartupProgress
from jaxserve.runtime.api_process import tokenizer_of
from jaxserve.runtime.startup_display import StartupDisplay
from jaxserve.tools.bench.client import RequestRecord
from jaxserve.tools.bench.offline import OfflineLoad, measure_offline
from jaxserve.tools.bench.tokens import LocalTokens


def run_offline(
    config: Config,
    load: OfflineLoad,
    add_bar: Callable[[str, int], tuple[Callable[[], None], Callable[[RequestRecord], None]]],
) -> dict[str, Any]:
    """Load the model, measure `load` in the format of the model (chat, if it has a template) and return the figures."""
    path = resolve(config.model.model, config.model.revision)
    tokenizer = tokenizer_of(config, path)
    load = dataclasses.replace(load, form="chat" if tokenizer.chat_templates else "text")
    spec = EngineSpec(config=config, model_path=str(path), address="")
    with StartupDisplay() as display:
        executor = build_executor(spec, lambda *progress: display.show(StartupProgress(*progress)))
    try:
        on_start, on_done = add_bar(f"{load.workload.name}, offline", load.num_prompts)
        core = build_core(spec, executor)
        tokens = LocalTokens(tokenizer, str(path))
        return asyncio.run(measure_offline(core, tokens, load, on_start=on_start, on_done=on_done))
    finally:
        executor.close()


def grammar_of(structured_outputs: Mapping[str, Any] | None, max_depth: int) -> Grammar | None:
    """Return the grammar that the request field `structured_outputs` asks for. Raises ConfigError for an invalid value."""
    if structured_outputs is None:
        return None
    try:
        constraint = chosen_constraint(msgspec.convert(structured_outputs, StructuredOutputs))
        return None if constraint is None else constraint_grammar(constraint, max_depth).grammar
    except (msgspec.ValidationError, RequestError) as error:
        raise ConfigError(f"--structured-outputs: {error}") from None
