"""An executor on this host's devices: opens the checkpoint, places it, compiles, runs."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax

from jaxserve import __version__
from jaxserve.checkpoint.adapted import with_adapters
from jaxserve.checkpoint.open import open_checkpoint
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.config import Config
from jaxserve.executor.adapters import adapters_config, open_adapters
from jaxserve.executor.preparation import Preparation, prepare
from jaxserve.executor.protocol import Progress
from jaxserve.executor.sampling_defaults import sampling_defaults
from jaxserve.executor.trial import with_tried_kernels
from jaxserve.ipc.messages import ModelInfo
from jaxserve.ipc.report import PhaseClock, PhaseSpan, ProgramReport, StartupReport
from jaxserve.layers.attention import KVPool
from jaxserve.models.registry import decoder_of
from jaxserve.models.skeleton import EncoderSkeleton, ModelSkeleton
from jaxserve.runner.cache_directory import cache_directory
from jaxserve.runner.compilations import CompilationCounter
from jaxserve.runner.inputs import Program
from jaxserve.runner.manifest import explain_misses
from jaxserve.runner.memory import check_host_memory
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.runner import PendingStep, Runner
from jaxserve.runner.upkeep import Keeper, Upkeep
from jaxserve.runner.warmup import MadeProgram, executables, run_once
from jaxserve.scheduler.plan import Buckets, StepPlan
from jaxserve.weights.loader import check_tensors, load_params

_LOG = logging.getLogger(__name__)


class LocalExecutor:
    """One model on this process's devices."""

    task: Literal["generate"] = "generate"

    def __init__(
        self, runner: Runner, model_info: ModelInfo, buckets: Buckets, eos: frozenset[int], counter: CompilationCounter
    ) -> None:
        self._runner = runner
        self._counter = counter
        self.model_info = model_info
        self.buckets = buckets
        self.eos_token_ids = eos
        counter.phase = "serving"

    @classmethod
    def start(cls, config: Config, model_path: Path, progress: Progress) -> LocalExecutor:
        """Load and compile; returns when every program has run. Raises StartupError in one line."""
        clock = PhaseClock()
        counter = CompilationCounter()
        with clock.phase("open"):
            checkpoint = open_checkpoint(model_path)
            decoder = decoder_of(checkpoint)
            config = with_tried_kernels(config, decoder, clock, progress)
            adapters = open_adapters(config, decoder)
            prepared = prepare(config, decoder, room := adapters_config(adapters))
            if room is not None:
                checkpoint = with_adapters(checkpoint, adapters, room.rank)
            check_tensors(checkpoint, prepared.skeleton)
            defaults = sampling_defaults(config.model.generation_config, checkpoint)
            if prepared.device.platform == "cpu":
                check_host_memory(prepared.limits.num_blocks * prepared.limits.spec.bytes_per_block)
        _LOG.info("limits: %s", prepared.limits.summary)
        if defaults:
            _LOG.info("sampling, where requests say nothing: %s", defaults)
        runner, programs = _load(prepared, checkpoint, config, clock, progress)
        with clock.phase("first_run"):
            run_once(runner, prepared.programs, partial(progress, "first_run"))
        runner.provide_memory()
        model_info = _model_info(
            prepared, fingerprint(checkpoint, prepared.skeleton, config), clock.spans, programs, defaults
        )
        return cls(runner, model_info, prepared.limits.buckets, frozenset(prepared.decoder.eos_token_ids), counter)

    def submit(self, plan: StepPlan) -> PendingStep:
        return self._runner.submit(plan)

    def compilations(self) -> dict[str, int]:
        return dict(self._counter.counts)

    def close(self) -> None:
        self._counter.close()


def _load(
    prepared: Preparation, checkpoint: Checkpoint, config: Config, clock: PhaseClock, progress: Progress
) -> tuple[Runner, list[ProgramReport]]:
    """Weights and programs at the same time: compiling needs shapes alone."""
    cache = ProgramCache(cache_directory(config.compile.compile_cache))

    def load_weights() -> tuple[jax.Array, ...]:
        with clock.phase("load"):
            return load_params(checkpoint, prepared.skeleton, prepared.sharding, partial(progress, "load"))

    def make_programs() -> dict[Program, MadeProgram]:
        with clock.phase("compile"):
            return prepared.make_programs(cache, partial(progress, "compile"))

    def make_pool(upkeep: Future[dict[Upkeep, MadeProgram]], after: Future[Any]) -> tuple[Keeper, KVPool]:
        keeper = Keeper(prepared.keeping, executables(upkeep.result()))
        after.result()
        with clock.phase("kv_cache"):
            return keeper, keeper.new_pool()

    # The compilers of accelerators may want the memory for a while; on a CPU, zeroing it takes time beside them.
    is_pool_early = prepared.device.platform == "cpu"
    background = ThreadPoolExecutor(4, thread_name_prefix="load")
    try:
        upkeep = background.submit(prepared.make_upkeep, cache)
        steps = background.submit(make_programs)
        params = background.submit(load_weights)
        pool = background.submit(make_pool, upkeep, upkeep if is_pool_early else steps)
        work: list[Future[Any]] = [upkeep, steps, params, pool]
        for future in wait(work, return_when=FIRST_EXCEPTION).done:
            future.result()
    finally:
        background.shutdown(wait=False, cancel_futures=True)
    made: list[tuple[Program | Upkeep, MadeProgram]] = [*steps.result().items(), *upkeep.result().items()]
    reports = [ProgramReport(program.name, result.source, result.seconds) for program, result in made]
    if cache.directory is not None:
        explain_misses(cache.directory, prepared.facts(), sum(report.source == "compiled" for report in reports))
    keeper, first_pool = pool.result()
    return Runner(params.result(), first_pool, keeper, executables(steps.result())), reports


def _model_info(
    prepared: Preparation,
    identity: str,
    spans: Iterable[PhaseSpan],
    programs: list[ProgramReport],
    defaults: dict[str, int | float],
) -> ModelInfo:
    limits = prepared.limits
    report = StartupReport(sorted(spans, key=lambda span: span.start_s), programs)
    return ModelInfo(
        vocab_size=prepared.decoder.vocab_size,
        max_model_len=limits.max_model_len,
        num_kv_blocks=limits.num_blocks,
        block_size=limits.spec.block_size,
        max_num_seqs=limits.buckets.max_num_seqs,
        kv_dtype=str(limits.kv_dtype),
        platform=prepared.device.platform,
        num_devices=len(prepared.sharding.devices),
        fingerprint=identity,
        startup=report,
        sampling_defaults=defaults,
    )


def fingerprint(checkpoint: Checkpoint, skeleton: ModelSkeleton | EncoderSkeleton, config: Config) -> str:
    """8 hex digits over what decides the output: checkpoint, dtype, mesh, versions."""
    identity = (
        checkpoint.path.name,
        [(info.name, info.stored_dtype, info.num_stored_bytes) for info in checkpoint.tensors.values()],
        skeleton.config,
        skeleton.policy,
        config.parallel.tensor_parallel_size,
        jax.__version__,
        __version__,
    )
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:8]
