"""An executor on this host's devices: opens the checkpoint, places it, compiles, runs."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic

import jax
import msgspec

from jaxserve import __version__
from jaxserve.checkpoint.files import read_object
from jaxserve.checkpoint.peft import Adapter
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.source import original_config, resolve_tower
from jaxserve.config import Config
from jaxserve.errors import CheckpointError
from jaxserve.executor.adapters import adapters_config, open_adapters
from jaxserve.executor.content_digest import LoadedFiles, content_digest, weights_digest
from jaxserve.executor.draft_model import DraftCheckpoint, open_draft_model
from jaxserve.executor.embedding import read_modules
from jaxserve.executor.hosts.agreement import (
    ONE_HOST,
    Hosts,
    agree_common,
    agree_equal,
    agree_kernels,
    checkpoint_hash,
    on_one_host,
)
from jaxserve.executor.hosts.memory import device_memory
from jaxserve.executor.images import image_info, prompt_embeds_info
from jaxserve.executor.late_programs import LatePrograms, late_programs
from jaxserve.executor.measured import Measured
from jaxserve.executor.preparation import Preparation, prepare, resolve_task
from jaxserve.executor.protocol import Progress
from jaxserve.executor.routed_experts import routed_experts_info
from jaxserve.executor.self_test.check import with_tested_kernels
from jaxserve.executor.served_weights import ServedWeights, WithMeasured, served_tensors
from jaxserve.ipc.messages import ModelInfo
from jaxserve.ipc.report import ModelWork, PhaseClock, PhaseSpan, ProgramReport, StartupReport
from jaxserve.ipc.stats import EngineStats
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.registry import model_of, open_model, unread_keys
from jaxserve.models.skeleton import EncoderSkeleton, ModelSkeleton
from jaxserve.models.step_work import step_work
from jaxserve.runner.images.served import with_served_images
from jaxserve.runner.inputs import PlanT, Program, ResultT
from jaxserve.runner.kv_scales.measurement import KVScaleMeasurement
from jaxserve.runner.memory import check_host_memory, check_offload_memory
from jaxserve.runner.outputs.reports import open_reports
from jaxserve.runner.pages import DevicePages, open_pages, page_layout
from jaxserve.runner.program_cache import ProgramCache, cache_directory, explain_misses
from jaxserve.runner.runner import PendingStep, Runner
from jaxserve.runner.state import DeviceState, StateProgram
from jaxserve.runner.warmup import CompilationCounter, MadeProgram, executables, warm_up
from jaxserve.sampling.params import DEFAULTS, OPTIONS, RECOMMENDED, option_type
from jaxserve.scheduler.plan import Buckets
from jaxserve.weights.loader import check_tensors, load_params

_LOG = logging.getLogger(__name__)


class LocalExecutor(Generic[PlanT, ResultT]):
    """One model on this process's devices."""

    def __init__(
        self,
        runner: Runner[PlanT, ResultT],
        model_info: ModelInfo,
        buckets: Buckets,
        eos_token_ids: frozenset[int],
        counter: CompilationCounter,
        pages: DevicePages | None = None,
        snapshots: DevicePages | None = None,
        weights: ServedWeights | None = None,
        late: LatePrograms | None = None,
    ) -> None:
        """late: programs to make from now on; None: all are there."""
        self._runner = runner
        self._counter = counter
        self._device_memory = Measured(device_memory)
        self.model_info = model_info
        self.buckets = buckets
        self.eos_token_ids = eos_token_ids
        self.pages = pages
        self.snapshots = snapshots
        self.weights = weights
        self._late = late
        counter.phase = "serving"
        if late is not None:
            late.start()

    @classmethod
    def start(
        cls,
        config: Config,
        model_path: Path,
        progress: Progress,
        hosts: Hosts = ONE_HOST,
        *,
        reports_tokens: bool = False,
        has_late_programs: bool = False,
    ) -> LocalExecutor[Any, Any]:
        """Load and compile; returns when every program has run. Raises StartupError in one line.

        hosts: those that the engine's devices are divided over; each of them calls this at the same time. reports_tokens: read
        tokens of loops over decode steps while they go on; only one executor of a process may. has_late_programs: return before
        programs are there whose steps others can do, see `late_programs`, and load or compile them meanwhile.
        """
        clock = PhaseClock()
        counter = CompilationCounter()
        with clock.phase("open"):
            mmproj = resolve_tower(config.images)
            files = LoadedFiles(model_path, mmproj) if config.tiers.are_shared else None
            checkpoint = open_model(model_path, mmproj)
            model = stored_model = model_of(checkpoint)
            _warn_of_overrides(config, model_path, checkpoint)
            if isinstance(model, DecoderConfig):
                if resolve_task(config.model, model) == "generate":
                    model = with_served_images(config.images, model, model_path, checkpoint, mmproj)
                tested = with_tested_kernels(on_one_host(config), model, clock, progress)
                config = agree_kernels(hosts, replace(config, compile=tested.compile))
            with clock.phase("hosts") if config.hosts.num_hosts > 1 else contextlib.nullcontext():
                hosts.connect()
            draft = open_draft_model(config, model, model_path)
            adapters, prepared = _prepare(config, model, checkpoint, hosts, draft.decoder)
            base, checkpoint = checkpoint, served_tensors(prepared, checkpoint, adapters)
            parts = {"checkpoint": checkpoint_hash(checkpoint)} | prepared.key_parts()
            if config.hosts.num_hosts > 1:
                parts["samples of the weights"] = weights_digest([base, *draft.checkpoints], adapters)
            agree_equal(hosts, "programs", parts)
            check_tensors(checkpoint, prepared.skeleton)
            draft.check_tensors(prepared)
            defaults = {}
            if prepared.embedding is None:
                defaults = sampling_defaults(config.model.generation_config, checkpoint)
            if prepared.device.platform == "cpu":
                kv_bytes = prepared.limits.cache.num_bytes // config.hosts.num_hosts
                check_host_memory(kv_bytes, prepared.held_bytes, config.cache, config.parallel.replicas)
            check_offload_memory(config.tiers.kv_offload_memory)
        _LOG.info("limits: %s", prepared.summary)
        if defaults:
            _LOG.info("sampling, where requests say nothing: %s", defaults)
        cache = ProgramCache(cache_directory(config.compile.compile_cache), in_all=partial(agree_common, hosts))
        late = late_programs(prepared) if has_late_programs else ()
        load = _load(prepared, checkpoint, draft, cache, late, clock, progress)
        params, state, steps, reports, measured = load
        runner = Runner(prepared.task, params, state, executables(steps), prepared.shared_params)
        hosts.exchange("first run", {})  # others may compile for minutes; the first collective waits for them for 30 s
        with clock.phase("first_run"):
            platform = prepared.device.platform
            there = [program for program in prepared.programs if program in steps]
            warm_up(runner, prepared.task, there, platform, partial(progress, "first_run"))
        if reports_tokens:
            runner.reports = open_reports(prepared.programs, prepared.skeleton.policy)
        state.provide_memory()
        identity = fingerprint(checkpoint, prepared.skeleton, config)
        pages = snapshots = None
        if prepared.has_tiers:
            digest = content_digest(base, identity, adapters)
            if draft.checkpoint is not None:
                digest = content_digest(draft.checkpoint, digest)
            pages, snapshots = open_pages(page_layout(digest, prepared.limits.shapes or ()), state)
        model_info = msgspec.structs.replace(
            _model_info(prepared, identity, clock.spans, reports),
            sampling_defaults=defaults,
            logprobs_mode=config.model.logprobs_mode,
            images=image_info(prepared, config.images),
            prompt_embeds=prompt_embeds_info(prepared),
            routed_experts=routed_experts_info(config, model),
        )
        eos_token_ids = frozenset(model.eos_token_ids if isinstance(model, DecoderConfig) else ())
        weights = ServedWeights(config, prepared, base, stored_model, adapters, runner, state, draft, measured, files)
        rest = LatePrograms(prepared, cache, late, runner)
        sizes = prepared.limits.buckets, eos_token_ids
        return cls(runner, model_info, *sizes, counter, pages, snapshots, weights, rest)

    def submit(self, plan: PlanT) -> PendingStep[PlanT, ResultT]:
        return self._runner.submit(plan)

    def dispatch(self, plan: PlanT) -> Callable[[], None]:
        """Start a step whose results this host does not read; returns a function that waits for its end, or raises its
        error."""
        return self._runner.dispatch(plan).wait

    def compilations(self) -> dict[str, int]:
        """Return the number of backend compilations so far by phase: `{"warmup": n, "serving": n}`."""
        return dict(self._counter.counts)

    def add_stats(self, stats: EngineStats) -> None:
        stats.compilations = self.compilations()
        stats.late_programs = 0 if self._late is None else self._late.num_left
        stats.device_memory_bytes = self._device_memory.value

    def profile(self, is_on: bool) -> None:
        """There are no other hosts."""

    def close(self) -> None:
        if self._late is not None:
            self._late.close()
        self._counter.close()


def _prepare(
    config: Config,
    model: DecoderConfig | EncoderConfig,
    checkpoint: Checkpoint,
    hosts: Hosts,
    draft: DecoderConfig | None,
) -> tuple[tuple[Adapter, ...], Preparation]:
    """Open the adapters, and prepare the engine."""
    if resolve_task(config.model, model) == "embed":
        return (), prepare(config, model, modules=read_modules(config.model, checkpoint.path), hosts=hosts)
    assert isinstance(model, DecoderConfig), "an encoder embeds"
    adapters = open_adapters(config, model, checkpoint.config, in_memory=True)
    return adapters, prepare(config, model, adapters_config(adapters, config.model, model), hosts=hosts, draft=draft)


def _load(
    prepared: Preparation,
    checkpoint: Checkpoint,
    draft: DraftCheckpoint,
    cache: ProgramCache,
    late: Sequence[Program],
    clock: PhaseClock,
    progress: Progress,
) -> tuple[tuple[jax.Array, ...], DeviceState, dict[Program, MadeProgram], list[ProgramReport], WithMeasured]:
    """Load weights and programs at the same time: compiling needs only shapes.

    On a GPU whose matmuls were not measured yet, programs come first: copies of weights would disturb the measurements,
    whose choices are kept. late: programs to leave out.
    """
    is_tuning = prepared.device.platform == "gpu" and not cache.has_tuned

    def load_weights(
        programs: Future[dict[Program, MadeProgram]], measuring: Future[KVScaleMeasurement | None]
    ) -> tuple[jax.Array, ...]:
        if is_tuning:
            programs.result()
            measuring.result()
        read: list[int] = []
        with clock.phase("load"):
            params = load_params(
                checkpoint, prepared.skeleton, prepared.sharding, partial(progress, "load"), read.append
            )
            params = _with_measured(measuring)(params) + draft.load(prepared)
        stored = sum(info.num_stored_bytes for info in checkpoint.tensors.values())
        _LOG.info("weights: this host read %d of %d stored bytes", sum(read), stored)
        return params

    def make_programs() -> dict[Program, MadeProgram]:
        with clock.phase("compile"):
            return prepared.make_programs(cache, partial(progress, "compile"), late)

    def make_state(programs: Future[dict[StateProgram, MadeProgram]], before: Sequence[Future[Any]]) -> DeviceState:
        made = executables(programs.result())
        for each in before:
            each.result()
        with clock.phase("kv_cache"):
            return DeviceState(prepared.state_shapes, made)

    # The compilers of accelerators may want the memory for a while, and so does what measures scales with the weights; on a CPU,
    # zeroing it takes time beside them.
    is_state_early = prepared.device.platform == "cpu"
    background = ThreadPoolExecutor(5, thread_name_prefix="load")
    try:
        state_programs = background.submit(prepared.make_state_programs, cache)
        steps = background.submit(make_programs)
        measuring = background.submit(prepared.make_kv_scales, cache)
        params = background.submit(load_weights, steps, measuring)
        before: list[Future[Any]] = [] if is_state_early else [steps]
        if not is_state_early and any(leaf.is_measured for leaf in prepared.skeleton.leaves):
            before.append(params)
        state = background.submit(make_state, state_programs, before)
        work: list[Future[Any]] = [state_programs, steps, params, state]
        for future in wait(work, return_when=FIRST_EXCEPTION).done:
            future.result()
    finally:
        background.shutdown(wait=False, cancel_futures=True)
    made: list[tuple[Program | StateProgram, MadeProgram]] = [*steps.result().items(), *state_programs.result().items()]
    reports = [ProgramReport(program.name, result.source, result.seconds) for program, result in made]
    cached = prepared.cached_programs(cache, late)
    reports += [ProgramReport(each.name, "cache_later" if each in cached else "later", 0.0) for each in late]
    if cache.directory is not None:
        explain_misses(cache.directory, prepared.key_parts(), sum(report.source == "compiled" for report in reports))
    return params.result(), state.result(), steps.result(), reports, _with_measured(measuring)


def _with_measured(measuring: Future[KVScaleMeasurement | None]) -> WithMeasured:
    """Return the function that measures what the parameters leave open."""
    return measuring.result() or (lambda params: params)


def _model_info(
    prepared: Preparation,
    identity: str,
    spans: Iterable[PhaseSpan],
    programs: list[ProgramReport],
) -> ModelInfo:
    limits = prepared.limits
    return ModelInfo(
        vocab_size=prepared.skeleton.config.vocab_size,
        max_model_len=limits.max_model_len,
        num_kv_blocks=limits.num_blocks if prepared.embedding is None else 0,
        block_size=limits.spec.block_size,
        max_num_seqs=limits.buckets.max_num_seqs,
        kv_dtype=str(limits.kv_dtype),
        platform=prepared.device.platform,
        num_devices=len(prepared.sharding.devices),
        fingerprint=identity,
        startup=StartupReport(sorted(spans, key=lambda span: span.start_s), programs),
        embedding=prepared.embedding,
        windows=limits.cache.windows,
        num_state_slots=limits.cache.num_state_slots,
        work=_work(prepared.skeleton),
        kv_cache_bytes=limits.cache.num_bytes,
    )


def _work(skeleton: ModelSkeleton | EncoderSkeleton) -> ModelWork | None:
    if not isinstance(skeleton, ModelSkeleton):
        return None
    work = step_work(skeleton)
    return ModelWork(2 * work.num_layer_weights, 2 * work.num_head_weights, work.read_bytes)


def fingerprint(checkpoint: Checkpoint, skeleton: ModelSkeleton | EncoderSkeleton, config: Config) -> str:
    """Return 8 hex digits over everything that decides the output: checkpoint, dtype, mesh, versions."""
    identity = (
        checkpoint.path.name,
        [(info.name, info.stored_dtype, info.num_stored_bytes) for info in checkpoint.tensors.values()],
        skeleton.config,
        skeleton.policy,
        skeleton.policy.rules,
        jax.__version__,
        __version__,
    )
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:8]


def _warn_of_overrides(config: Config, path: Path, checkpoint: Checkpoint) -> None:
    """Log the names in `--hf-overrides` that nothing reads. path: of the folder with the overrides."""
    if config.model.hf_overrides is not None:
        for name in unread_keys(checkpoint, config.model.overrides, original_config(path)):
            _LOG.warning("--hf-overrides: %s: config.json has no such key, and the model does not read it", name)


_FILE: Final = "generation_config.json"


def sampling_defaults(setting: str, checkpoint: Checkpoint) -> dict[str, int | float]:
    """Return the recommended defaults by option; `setting` is `--generation-config`.

    Lengths, beams and `do_sample` are not taken: they are for programs that generate one text. Raises CheckpointError
    for a file that cannot be read, and for a value that no request could have.
    """
    if setting == "none":
        return {}
    if setting == "auto":
        origin = checkpoint.path / _FILE if checkpoint.path.is_dir() else checkpoint.path
        return _checked(checkpoint.generation_config, origin, "--generation-config none goes without")
    path = Path(setting).expanduser()
    file = path / _FILE if path.is_dir() else path
    return _checked(read_object(file), file, "as --generation-config has it")


def _checked(config: dict[str, Any], origin: Path, advice: str) -> dict[str, int | float]:
    defaults: dict[str, int | float] = {}
    for name in RECOMMENDED:
        value = config.get(name)
        if value is None:
            continue
        try:
            defaults[name] = (
                DEFAULTS[name] if value == OPTIONS[name].alias else msgspec.convert(value, option_type(name, str))
            )
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{origin}: key '{name}': {error}, found {str(value)[:80]} ({advice})") from None
    return defaults
