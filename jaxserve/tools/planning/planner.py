"""Makes a plan: checks the fit by arithmetic, then with the device's compiler, and derives concurrency and bounds."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxserve.checkpoint.source import resolve_model, resolve_tower
from jaxserve.config import Config, ImagesConfig, ServerConfig
from jaxserve.errors import DoesNotFitError
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.registry import read_decoder
from jaxserve.runner.backend import attention_notes
from jaxserve.runner.cache_sizes import with_cache_groups
from jaxserve.runner.images.programs import with_images
from jaxserve.runner.images.served import with_served_images
from jaxserve.runner.inputs import Program, programs
from jaxserve.runner.limits import Limits, context_notes, kv_cache_dtype, quantization_notes
from jaxserve.runtime.environment import child_environment
from jaxserve.runtime.startup_display import StartupDisplay
from jaxserve.tools.planning.adapters import adapters_notes
from jaxserve.tools.planning.advice import Advice, advice_for, attempt, find_advice
from jaxserve.tools.planning.collectives import Links, step_collectives
from jaxserve.tools.planning.compiler import Answers, CompileJob, ProgramMemory, compile_programs
from jaxserve.tools.planning.devices import Device, Rates, measure_cpu_rates
from jaxserve.tools.planning.drafters import drafter_notes
from jaxserve.tools.planning.embedding import is_embedding, plan_embedding, read_embedding_model
from jaxserve.tools.planning.fit import Fit, gib, held_bytes, make_fit, model_sizes, planned_chip, planned_policy
from jaxserve.tools.planning.machine import Machine, with_sizes
from jaxserve.tools.planning.plan import (
    CachePart,
    Concurrency,
    DevicePart,
    Exchanges,
    MemoryPart,
    ModelPart,
    Plan,
    StepPart,
)
from jaxserve.tools.planning.roofline import decode_bound, prefill_bound
from jaxserve.tools.planning.sizes import Sizes, token_bytes
from jaxserve.tools.planning.stored import bytes_by_dtype
from jaxserve.tools.planning.targets import missing_compiler
from jaxserve.types import GPU_SHARE

BATCHES = (1, 8, 32, 128, 256)
LENGTHS = (1024, 4096, 32768)
_MOST_HALVINGS = 5
_NUM_REFINEMENTS = 2

Compile = Callable[[CompileJob], Answers]


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A decoder and the path of its config."""

    path: Path
    decoder: DecoderConfig
    stored_bytes: int | None
    """Bytes of the checkpoint's tensors; None if there is only a config."""
    stored_dtypes: tuple[str, ...]
    """Types of the tensors, the one with most bytes first."""


def read_model(path: Path, images: ImagesConfig | None = None) -> PlannedModel:
    """Read a GGUF file, or a directory with config.json, with or without weights; of weights what `decoder_of` reads.

    images: settings of image input; None for the defaults. Raises CheckpointError with one line.
    """
    images = images or ImagesConfig()
    mmproj = resolve_tower(images, progress=True)
    decoder, checkpoint = read_decoder(path, mmproj)
    decoder = with_served_images(images, decoder, path, checkpoint, mmproj)
    if checkpoint is None:
        return PlannedModel(path, decoder, None, ())
    by_dtype = bytes_by_dtype(checkpoint)
    return PlannedModel(path, decoder, sum(by_dtype.values()), tuple(by_dtype))


def make_plan(config: Config, machine: Machine, *, compiles: bool, all_programs: bool) -> Plan:
    """Return the plan of a config, for all devices of `machine` if it says how many; the engine's warnings are notes of the
    plan and are not logged.

    compiles: False estimates the workspace. all_programs: True compiles every program, not only the largest of each
    kind. Raises CheckpointError or another StartupError with one line.
    """
    with quiet_engine():
        return plan_model(config, machine, device_rates(machine.device), compiles=compiles, all_programs=all_programs)


@contextlib.contextmanager
def quiet_engine() -> Iterator[None]:
    """Log no warnings of the engine's arithmetic for the block."""
    logger = logging.getLogger("jaxserve")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def device_rates(device: Device) -> Rates | None:
    """Return the published rates of a device; of this machine's CPU measured ones."""
    return measure_cpu_rates() if device.platform == "cpu" else device.rates


def plan_model(
    config: Config,
    machine: Machine,
    rates: Rates | None,
    *,
    compiles: bool,
    all_programs: bool = False,
    notes: Sequence[str] = (),
) -> Plan:
    """Return the plan of one model, with the arguments of `make_plan`. rates: None leaves the roofline out."""
    path = resolve_model(config.model, weights=False)
    machine = machine.of_one_replica(config.parallel)
    device = machine.device
    if (replicas := config.parallel.replicas) > 1:
        share = "an equal part of the memory" if device.platform == "cpu" else "devices of its own"
        notes = (*notes, f"the plan is that of one of {replicas} replicas, each of which has {share}")
    if is_embedding(config, path):
        return plan_embedding(config, read_embedding_model(config.model, path), device, rates, notes)
    config.model.check_generates()
    model = read_model(path, config.images)
    config = with_sizes(config, model.decoder.with_context(config.model.max_model_len), machine)
    planner = Planner(model, device, rates, num_hosts=machine.num_hosts, all_programs=all_programs)
    missing = missing_compiler(device, config.parallel.num_devices) if compiles else None
    if not compiles or missing is not None:
        note = f"nothing was compiled, the workspace is estimated: {missing}"
        return planner.plan(config, None, [*notes, note] if compiles else notes)
    with StartupDisplay() as display:
        return planner.plan(
            config, lambda job: compile_programs(job, child_environment(), display.show_compiled), notes
        )


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Result of compiling the programs of one fit."""

    programs: tuple[ProgramMemory, ...]
    problem: str | None
    peak_bytes: int
    """Peak in one memory; 0 if the compiler rejected a program."""


class Planner:
    """Plans for one model and one device."""

    def __init__(
        self,
        model: PlannedModel,
        device: Device,
        rates: Rates | None,
        *,
        num_hosts: int = 1,
        all_programs: bool = False,
    ) -> None:
        """rates: published or measured rates; None leaves the roofline out."""
        self._model = model
        self._device = device
        self._rates = rates
        self._num_hosts = num_hosts
        self._all_programs = all_programs

    def plan(self, config: Config, compile_job: Compile | None, notes: Sequence[str] = ()) -> Plan:
        """Return the plan for `config`. compile_job: None leaves the workspace estimated."""
        decoder, device = self._decoder(config), self._device
        sizes = model_sizes(config, decoder, device)
        adapters = gib(held_bytes(device, sizes, sizes.adapters_bytes))
        notes = (*notes, *adapters_notes(config, decoder, adapters))
        try:
            fit = make_fit(config, decoder, device)
        except DoesNotFitError as error:
            advice = find_advice(config, decoder, device)
            return replace(self._needs(config, sizes, notes), reason=str(error), advice=advice)
        plan = self._needs(config, sizes, (*notes, *self._notes(config, sizes, fit.limits)))
        outcome = None if compile_job is None else self._outcome(config, sizes, fit, compile_job)
        plan = self._with_fit(plan, sizes, fit, outcome)
        if compile_job is None or plan.fits:
            return plan
        return replace(plan, advice=self._smaller_cache(config, sizes, fit, compile_job))

    def _needs(self, config: Config, sizes: Sizes, notes: Sequence[str]) -> Plan:
        """Return the plan of an engine that may not fit."""
        model, device, decoder = self._model, self._device, self._model.decoder
        return Plan(
            model=ModelPart(
                path=str(model.path),
                num_parameters=sizes.num_parameters,
                num_layers=decoder.num_layers,
                max_position=decoder.max_position,
                stored_bytes=model.stored_bytes,
                stored_dtypes=model.stored_dtypes,
            ),
            device=DevicePart(
                name=device.name,
                title=device.title,
                count=sizes.num_devices,
                num_hosts=self._num_hosts,
                tensor_parallel_size=sizes.shape.tensor,
                data_parallel_size=sizes.shape.data,
                expert_parallel_size=sizes.shape.expert,
                memory_bytes=device.memory_bytes,
                limit_bytes=device.limit_bytes,
                rates=self._rates,
            ),
            weights_stored_as=sizes.stored_as,
            arithmetic=sizes.arithmetic,
            weights_bytes=sizes.weights_bytes,
            kv_bytes_per_token=token_bytes(config, decoder, device.platform),
            notes=tuple(notes),
        )

    def _with_fit(self, plan: Plan, sizes: Sizes, fit: Fit, outcome: _Outcome | None) -> Plan:
        limits, problem = fit.limits, None if outcome is None else outcome.problem
        lengths = sorted({length for length in LENGTHS if length < limits.max_model_len} | {limits.max_model_len})
        plan = replace(
            plan,
            fits=problem is None,
            reason=problem,
            memory=_memory(fit, outcome),
            cache=CachePart(
                dtype=str(limits.kv_dtype),
                bytes_per_token=limits.cache.bytes_per_token,
                bytes_per_block=limits.cache.bytes_per_token * limits.spec.block_size,
                block_size=limits.spec.block_size,
                num_blocks=limits.num_blocks,
                num_tokens=limits.num_usable_blocks * limits.spec.block_size,
                windows=limits.cache.windows,
                num_state_slots=limits.cache.num_state_slots,
                state_slot_bytes=limits.cache.slot_bytes,
            ),
            step=StepPart(
                max_model_len=limits.max_model_len,
                max_num_seqs=limits.buckets.max_num_seqs,
                max_num_batched_tokens=max(limits.buckets.mixed),
                decode_rows=limits.buckets.decode,
                mixed_tokens=limits.buckets.mixed,
            ),
            concurrency=tuple(_concurrency(limits, length) for length in lengths),
            programs=() if outcome is None else outcome.programs,
        )
        if self._rates is None:
            return plan
        rates, itemsize, chunk = self._rates, limits.kv_dtype.itemsize, max(limits.buckets.mixed)
        links = Links.of(self._device), self._num_hosts
        rows = max(limits.buckets.decode)
        steps = (("decode", rows, rows), ("mixed", chunk, limits.buckets.mixed_rows(chunk)))
        return replace(
            plan,
            exchanges=tuple(
                Exchanges(f"{kind}/{num_tokens}", collectives, links[0].seconds(collectives))
                for kind, num_tokens, num_rows in steps
                for collectives in (step_collectives(sizes, num_tokens, num_rows, self._num_hosts),)
                if collectives
            ),
            decode=tuple(
                decode_bound(sizes, rates, itemsize, batch, row.length, *links, fits=batch <= row.num_requests)
                for row in plan.concurrency
                for batch in BATCHES
            ),
            prefill=tuple(prefill_bound(sizes, rates, length, chunk, *links) for length in lengths),
        )

    def _outcome(self, config: Config, sizes: Sizes, fit: Fit, compile_job: Compile) -> _Outcome:
        limits = fit.limits
        answers = compile_job(
            CompileJob(
                config=replace(config, server=ServerConfig()),  # without the API keys
                device=self._device,
                decoder=self._decoder(config),
                shapes=limits.shapes or (),
                programs=self._programs(fit),
            )
        )
        done = tuple(answer for answer in answers.values() if isinstance(answer, ProgramMemory))
        for name, answer in answers.items():
            if isinstance(answer, str):
                return _Outcome(done, f"{name} does not compile: {answer}", 0)
        largest = max(done, key=lambda program: program.peak_bytes)
        peak = held_bytes(self._device, sizes, largest.peak_bytes)
        problem = None
        if peak > fit.limit_bytes:
            problem = (
                f"{largest.name} needs {gib(peak)} while it runs ({gib(largest.temp_bytes)} of it temporary), "
                f"{self._device.title} gives {gib(fit.limit_bytes)}"
            )
        return _Outcome(done, problem, peak)

    def _smaller_cache(self, config: Config, sizes: Sizes, fit: Fit, compile_job: Compile) -> tuple[Advice, ...]:
        """Return a KV cache with which the compiler's numbers fit: at least 84 % of the largest one that does.

        A search over the bytes of all cache groups: peaks are not linear in the size, since a compiler short of memory chooses other layouts. The size is
        halved until it fits, then refined with two geometric means between a size that fits and one that does not.
        """

        def tried(num_bytes: int) -> tuple[int, Advice] | None:
            num_bytes = num_bytes >> 20 << 20
            candidate = attempt(config, self._device, "kv_cache_memory", num_bytes)
            if num_bytes:
                with contextlib.suppress(DoesNotFitError):
                    found = make_fit(candidate.config, self._decoder(config), self._device)
                    if self._outcome(candidate.config, sizes, found, compile_job).problem is None:
                        return num_bytes, advice_for(candidate.change, found)
            return None

        too_many, best = fit.limits.cache.num_bytes, None
        for _ in range(_MOST_HALVINGS):
            if best := tried(too_many // 2):
                break
            too_many //= 2
        if best is None:
            return ()
        for _ in range(_NUM_REFINEMENTS):
            middle = math.isqrt(best[0] * too_many)
            if larger := tried(middle):
                best = larger
            else:
                too_many = middle
        return (best[1],)

    def _programs(self, fit: Fit) -> tuple[Program, ...]:
        """Return all programs, or the largest of each kind, which bound the memory."""
        every = programs(fit.limits.buckets, *fit.limits.program_sizes)
        every = every if fit.images is None else with_images(every, fit.images)
        if self._all_programs:
            return every
        kinds = dict.fromkeys(program.kind for program in every)
        return tuple(
            max((program for program in every if program.kind == kind), key=lambda program: program.num_tokens)
            for kind in kinds
        )

    def _decoder(self, config: Config) -> DecoderConfig:
        decoder = self._model.decoder.with_context(config.model.max_model_len)
        return with_cache_groups(config, decoder.for_devices(config.parallel.tensor_parallel_size))

    def _notes(self, config: Config, sizes: Sizes, limits: Limits) -> tuple[str, ...]:
        decoder, device = self._decoder(config), self._device
        notes = []
        if config.model.max_model_len is None and limits.max_model_len < decoder.max_position:
            notes.append(
                f"context shortened from {decoder.max_position:,} to the {limits.max_model_len:,} tokens that the "
                "KV cache holds"
            )
        if sizes.rules.count("kv_heads") < sizes.shape.tensor:
            notes.append(
                f"{decoder.num_kv_heads} KV heads do not divide over {sizes.shape.tensor} devices: each holds them all"
            )
        if decoder.kv_copies > 1:
            notes.append(
                f"each of the {decoder.num_stored_kv_heads} KV heads, and its part of the KV cache, is held by "
                f"{decoder.kv_copies} devices; --data-parallel-size divides the cache instead"
            )
        notes.extend(drafter_notes(config, decoder, device))
        notes.extend(context_notes(config, self._model.decoder))
        notes.extend(quantization_notes(config, decoder, planned_chip(device)))
        policy = planned_policy(config, decoder, device)
        kv_dtype = kv_cache_dtype(config, device.platform)
        notes.extend(attention_notes(config, decoder, planned_chip(device), policy.activations, kv_dtype))
        if device.platform == "gpu" and device.runtime_share == GPU_SHARE:
            notes.append(f"takes {GPU_SHARE:.0%} of the GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION is set")
        return tuple(notes)


def _concurrency(limits: Limits, length: int) -> Concurrency:
    by_cache = limits.cache.num_requests(length)
    most = limits.buckets.max_num_seqs
    return Concurrency(length, min(by_cache, most), "kv" if by_cache < most else "max_num_seqs")


def _memory(fit: Fit, outcome: _Outcome | None) -> MemoryPart:
    held = fit.held_bytes
    is_compiled = outcome is not None and outcome.peak_bytes > 0
    workspace = outcome.peak_bytes - held if outcome is not None and is_compiled else fit.workspace_bytes
    return MemoryPart(
        limit_bytes=fit.limit_bytes,
        weights_bytes=fit.weights_bytes,
        kv_bytes=fit.kv_bytes,
        workspace_bytes=workspace,
        workspace_is="compiled" if is_compiled else "estimated",
        free_bytes=fit.limit_bytes - held - workspace,
        image_bytes=fit.image_bytes,
        draft_bytes=fit.draft_bytes,
    )
