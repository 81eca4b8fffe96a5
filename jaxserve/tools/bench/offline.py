"""`jaxserve bench offline`: the engine in this process, without HTTP, tokenization or streaming.

Its figures add those of the engine to `bench serve`'s: steps per program, busy and idle time of the device, and padding.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jaxserve.checkpoint.source import resolve_model
from jaxserve.config import Config
from jaxserve.engine.core import EngineCore
from jaxserve.engine.process import build_core, build_executor
from jaxserve.errors import ConfigError, RequestError
from jaxserve.frontend.constraints import StructuredOutputs, structured_constraint
from jaxserve.frontend.grammar import constraint_grammar
from jaxserve.ipc.engine_spec import EngineSpec
from jaxserve.ipc.messages import AddRequest, Grammar, RequestOutput, StartupProgress
from jaxserve.ipc.stats import EngineStats
from jaxserve.runtime.models.model_runtime import tokenizer_of
from jaxserve.runtime.startup_display import StartupDisplay
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.tools.bench.client import BenchmarkError, RequestRecord
from jaxserve.tools.bench.report import DEFAULT_PERCENTILES, percentile, summarise
from jaxserve.tools.bench.tokens import LocalTokens, TokenSource
from jaxserve.tools.bench.workload import Form, Prompt, PromptMaker, Workload
from jaxserve.types import RequestId


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineLoad:
    """Requests for the engine."""

    workload: Workload
    form: Form = "text"
    num_prompts: int
    num_warmups: int = 0
    """Requests before the clock starts, one at a time."""
    max_concurrency: int | None = None
    """Requests in the engine at a time; None: all. The engine decides how many of them run together."""
    seed: int = 0
    percentiles: Sequence[float] = DEFAULT_PERCENTILES
    grammar: Grammar | None = None
    """Grammar of every reply; it may end one before its length."""


@dataclass(slots=True)
class EngineTotals:
    """Sums of `EngineStats`."""

    steps: Counter[str] = field(default_factory=Counter)
    device_seconds: dict[str, float] = field(default_factory=dict)
    padding_tokens: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    host_gaps_s: list[float] = field(default_factory=list)
    compilations: dict[str, int] = field(default_factory=dict)

    def add(self, stats: EngineStats) -> None:
        self.steps.update(stats.bucket_steps)
        self.padding_tokens.update(stats.padding_tokens)
        # Steps of two programs that ended together share an entry: their seconds are reported as a sum.
        if stats.bucket_steps:
            programs = " + ".join(sorted(stats.bucket_steps))
            self.device_seconds[programs] = self.device_seconds.get(programs, 0.0) + sum(stats.device_step_seconds)
        self.num_tokens += sum(stats.iteration_tokens_total)
        self.num_preemptions += stats.num_preemptions
        self.num_draft_tokens += stats.spec_decode_num_draft_tokens
        self.num_accepted_tokens += stats.spec_decode_num_accepted_tokens
        self.host_gaps_s += stats.host_gap_seconds
        self.compilations = stats.compilations

    def figures(self, duration_s: float) -> dict[str, Any]:
        device_seconds = sum(self.device_seconds.values())
        num_padding = self.padding_tokens.total()
        gaps_ms = [gap * 1000 for gap in self.host_gaps_s]
        return {
            "num_steps": self.steps.total(),
            "steps_by_program": dict(sorted(self.steps.items())),
            "device_seconds": device_seconds,
            "device_share": device_seconds / duration_s,
            "device_seconds_by_program": dict(sorted(self.device_seconds.items())),
            "computed_tokens": self.num_tokens,
            "padding_tokens": dict(sorted(self.padding_tokens.items())),
            "padding_share": num_padding / max(1, num_padding + self.num_tokens),
            "num_preemptions": self.num_preemptions,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "mean_host_gap_ms": statistics.fmean(gaps_ms) if gaps_ms else None,
            "median_host_gap_ms": percentile(gaps_ms, 50) if gaps_ms else None,
            "p99_host_gap_ms": percentile(gaps_ms, 99) if gaps_ms else None,
            "compilations": self.compilations,
        }


def run_offline(
    config: Config,
    load: OfflineLoad,
    add_bar: Callable[[str, int], tuple[Callable[[], None], Callable[[RequestRecord], None]]],
) -> dict[str, Any]:
    """Load the model, measure `load` in the format of the model (chat, if it has a template) and return the figures."""
    path = resolve_model(config.model)
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
        constraint = structured_constraint(msgspec.convert(structured_outputs, StructuredOutputs))
        return None if constraint is None else constraint_grammar(constraint, max_depth).grammar
    except (msgspec.ValidationError, RequestError) as error:
        raise ConfigError(f"--structured-outputs: {error}") from None


async def measure_offline(
    core: EngineCore,
    tokens: TokenSource,
    load: OfflineLoad,
    *,
    on_start: Callable[[], None],
    on_done: Callable[[RequestRecord], None],
) -> dict[str, Any]:
    """Return the figures of `report.summarise` and of the engine.

    Raises TokenizeError if prompts cannot be made, BenchmarkError if the engine breaks.
    """
    maker = PromptMaker(tokens, load.workload, load.form, seed=load.seed)
    prompts = await maker.make(load.num_warmups + load.num_prompts, run="offline")
    for prompt in prompts[: load.num_warmups]:
        _Run(core, load.grammar).do([prompt], 1, lambda record: None)
    run = _Run(core, load.grammar)
    on_start()
    started_s = time.perf_counter()
    records = run.do(prompts[load.num_warmups :], load.max_concurrency or load.num_prompts, on_done)
    duration_s = time.perf_counter() - started_s
    heading = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "offline",
        "workload": load.workload.name,
        "num_prompts": load.num_prompts,
        "num_warmups": load.num_warmups,
        "max_concurrency": load.max_concurrency,
        "seed": load.seed,
    }
    figures = summarise(records, duration_s=duration_s, percentiles=load.percentiles)
    return heading | figures | run.totals.figures(duration_s)


class _Run:
    """Runs requests through the engine."""

    def __init__(self, core: EngineCore, grammar: Grammar | None) -> None:
        self.totals = EngineTotals()
        self._core = core
        self._grammar = grammar
        self._records: dict[RequestId, RequestRecord] = {}
        self._num_left = 0

    def do(
        self, prompts: Sequence[Prompt], max_concurrency: int, on_done: Callable[[RequestRecord], None]
    ) -> list[RequestRecord]:
        """Run all of `prompts`, at most `max_concurrency` of them in the engine at a time."""
        waiting = deque(prompts)
        while waiting or self._num_left:
            while waiting and self._num_left < max_concurrency:
                self._add(waiting.popleft(), on_done)
            step = self._core.step()
            if step is not None:
                for output in step.outputs:
                    self._note(output, on_done)
                if step.stats is not None:
                    self.totals.add(step.stats)
            if self._core.is_broken:
                raise BenchmarkError("the engine is broken: two steps failed in a row")
        return list(self._records.values())

    def _add(self, prompt: Prompt, on_done: Callable[[RequestRecord], None]) -> None:
        request_id = RequestId(f"bench-{len(self._records)}")
        self._records[request_id] = RequestRecord(
            started_s=time.perf_counter(),
            num_sent_tokens=len(prompt.token_ids),
            num_wanted_tokens=prompt.num_output_tokens,
            num_prompt_tokens=len(prompt.token_ids),
            has_usage=True,
        )
        self._num_left += 1
        sampling = EngineSamplingParams(temperature=0.0, max_tokens=prompt.num_output_tokens, ignore_eos=True)
        message = AddRequest(request_id, list(prompt.token_ids), sampling, grammar=self._grammar)
        for output in self._core.handle(message):
            self._note(output, on_done)

    def _note(self, output: RequestOutput, on_done: Callable[[RequestRecord], None]) -> None:
        now_s = time.perf_counter()
        record = self._records[output.request_id]
        if output.token_ids:
            record.chunk_times_s.append(now_s)
            record.num_output_tokens += len(output.token_ids)
            record.num_cached_tokens = output.num_cached_tokens
        if output.error is not None:
            record.fail("engine", f"{output.error.error_class}: {output.error.message}")
        if output.finish_reason is not None:
            record.finished_s = now_s
            self._num_left -= 1
            on_done(record)
