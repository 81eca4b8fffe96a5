"""Makes a plan: checks the fit by arithmetic, then with the device's compiler, and derives concurrency and bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from jaxserve.config import Config, ServerConfig
from jaxserve.errors import DoesNotFitError
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.runner.inputs import Program, programs
from jaxserve.runner.limits import Limits, context_notes, kv_spec, quantization_notes
from jaxserve.tools.planning.advice import Advice, advice_for, cache_flag, find_advice
from jaxserve.tools.planning.devices import Device, Rates
from jaxserve.tools.planning.fit import Fit, gib, held_bytes, make_fit, model_sizes, planned_chip
from jaxserve.tools.planning.job import CompileJob, ProgramMemory, ProgramRefused
from jaxserve.tools.planning.model import PlannedModel
from jaxserve.tools.planning.plan import (
    FORMAT_VERSION,
    CachePart,
    Concurrency,
    DevicePart,
    MemoryPart,
    ModelPart,
    Plan,
    ProgramPart,
    StepPart,
)
from jaxserve.tools.planning.roofline import decode_bound, prefill_bound
from jaxserve.tools.planning.sizes import Sizes
from jaxserve.types import GPU_SHARE

BATCHES = (1, 8, 32, 128, 256)
LENGTHS = (1024, 4096, 32768)
_MOST_HALVINGS = 5
_NUM_REFINEMENTS = 2

Compile = Callable[[CompileJob], Sequence[ProgramMemory | ProgramRefused]]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Result of compiling the programs of one fit."""

    programs: tuple[ProgramMemory, ...]
    problem: str | None
    peak_bytes: int
    """Peak in one memory; 0 if the compiler rejected a program."""


class Planner:
    """Plans for one model and one device."""

    def __init__(self, model: PlannedModel, device: Device, rates: Rates | None, *, all_programs: bool = False) -> None:
        """rates: published or measured rates; None leaves the roofline out."""
        self._model = model
        self._device = device
        self._rates = rates
        self._all_programs = all_programs

    def plan(self, config: Config, compile_job: Compile | None, notes: Sequence[str] = ()) -> Plan:
        """Return the plan for `config`. compile_job: None leaves the workspace estimated."""
        decoder, device = self._decoder(config), self._device
        sizes = model_sizes(config, decoder, device)
        try:
            fit = make_fit(config, decoder, device)
        except DoesNotFitError as error:
            advice = find_advice(config, decoder, device)
            return self._bare(config, sizes, str(error), advice, notes)
        notes = (*notes, *self._notes(config, sizes, fit.limits))
        if compile_job is None:
            return self._full(config, sizes, fit, None, (), notes)
        outcome = self._outcome(config, sizes, fit, compile_job)
        advice = () if outcome.problem is None else self._smaller_cache(config, sizes, fit, compile_job)
        return self._full(config, sizes, fit, outcome, advice, notes)

    def _bare(
        self, config: Config, sizes: Sizes, reason: str | None, advice: tuple[Advice, ...], notes: Sequence[str]
    ) -> Plan:
        """Return the plan of an engine that may not fit: its needs, and changes that fit."""
        model, device, decoder = self._model, self._device, self._model.decoder
        return Plan(
            format_version=FORMAT_VERSION,
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
                memory_bytes=device.memory_bytes,
                limit_bytes=device.limit_bytes,
                rates=self._rates,
            ),
            weights_stored_as=sizes.stored_as,
            arithmetic=sizes.arithmetic,
            weights_bytes=sizes.weights_bytes,
            kv_bytes_per_token=kv_spec(config, decoder, device.platform).bytes_per_token,
            fits=False,
            reason=reason,
            advice=advice,
            notes=tuple(notes),
        )

    def _full(
        self,
        config: Config,
        sizes: Sizes,
        fit: Fit,
        outcome: _Outcome | None,
        advice: tuple[Advice, ...],
        notes: Sequence[str],
    ) -> Plan:
        limits, problem = fit.limits, None if outcome is None else outcome.problem
        lengths = sorted({length for length in LENGTHS if length < limits.max_model_len} | {limits.max_model_len})
        concurrency = tuple(_concurrency(limits, length) for length in lengths)
        step = StepPart(
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.buckets.max_num_seqs,
            max_num_batched_tokens=max(limits.buckets.mixed),
            decode_rows=limits.buckets.decode,
            mixed_tokens=limits.buckets.mixed,
        )
        plan = replace(
            self._bare(config, sizes, problem, advice, notes),
            fits=problem is None,
            memory=_memory(fit, outcome),
            cache=CachePart(
                dtype=str(limits.kv_dtype),
                bytes_per_token=limits.spec.bytes_per_token,
                bytes_per_block=limits.spec.bytes_per_block,
                block_size=limits.spec.block_size,
                num_blocks=limits.num_blocks,
                num_tokens=(limits.num_blocks - 1) * limits.spec.block_size,
            ),
            step=step,
            concurrency=concurrency,
            programs=() if outcome is None else tuple(map(_program_part, outcome.programs)),
        )
        if self._rates is None:
            return plan
        rates, itemsize = self._rates, limits.kv_dtype.itemsize
        return replace(
            plan,
            decode=tuple(
                decode_bound(sizes, rates, itemsize, batch, row.length, fits=batch <= row.num_requests)
                for row in concurrency
                for batch in BATCHES
            ),
            prefill=tuple(prefill_bound(sizes, rates, length, step.max_num_batched_tokens) for length in lengths),
        )

    def _outcome(self, config: Config, sizes: Sizes, fit: Fit, compile_job: Compile) -> _Outcome:
        limits = fit.limits
        answers = compile_job(
            CompileJob(
                config=replace(config, server=ServerConfig()),  # without the API keys
                device=self._device,
                decoder=self._decoder(config),
                kv_dtype=str(limits.kv_dtype),
                pool_shape=limits.pool_shape,
                programs=self._programs(limits),
            )
        )
        done = tuple(answer for answer in answers if isinstance(answer, ProgramMemory))
        for answer in answers:
            if isinstance(answer, ProgramRefused):
                return _Outcome(done, f"{answer.name} does not compile: {answer.reason}", 0)
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

        A search: peaks are not linear in the size, since a compiler short of memory chooses other layouts. The size is
        halved until it fits, then refined with two geometric means between a size that fits and one that does not.
        """

        def tried(num_blocks: int) -> Fit | None:
            candidate = self._with_cache(config, fit, num_blocks)
            if candidate is None or self._outcome(config, sizes, candidate, compile_job).problem is not None:
                return None
            return candidate

        too_many = fit.limits.num_blocks
        best = None
        for _ in range(_MOST_HALVINGS):
            best = tried(too_many // 2)
            if best is not None:
                break
            too_many //= 2
        if best is None:
            return ()
        for _ in range(_NUM_REFINEMENTS):
            middle = math.isqrt(best.limits.num_blocks * too_many)
            larger = tried(middle)
            if larger is None:
                too_many = middle
            else:
                best = larger
        return (advice_for(cache_flag(best.limits.num_blocks * best.limits.spec.bytes_per_block), best),)

    def _with_cache(self, config: Config, fit: Fit, num_blocks: int) -> Fit | None:
        num_bytes = _whole_mib(num_blocks * fit.limits.spec.bytes_per_block)
        if num_bytes == 0:
            return None
        try:
            changed = replace(config, cache=replace(config.cache, kv_cache_memory=num_bytes))
            return make_fit(changed, self._decoder(config), self._device)
        except DoesNotFitError:
            return None

    def _programs(self, limits: Limits) -> tuple[Program, ...]:
        """Return all programs, or the largest of each kind, which bound the memory."""
        every = programs(limits.buckets, limits.max_pages)
        if self._all_programs:
            return every
        kinds = dict.fromkeys(program.kind for program in every)
        return tuple(
            max((program for program in every if program.kind == kind), key=lambda program: program.num_tokens)
            for kind in kinds
        )

    def _decoder(self, config: Config) -> DecoderConfig:
        return self._model.decoder.with_context(config.model.max_model_len)

    def _notes(self, config: Config, sizes: Sizes, limits: Limits) -> tuple[str, ...]:
        decoder, device = self._decoder(config), self._device
        notes = []
        if config.model.max_model_len is None and limits.max_model_len < decoder.max_position:
            notes.append(
                f"context shortened from {decoder.max_position:,} to the {limits.max_model_len:,} tokens that the "
                "KV cache holds"
            )
        if sizes.kv_shards < sizes.num_devices:
            notes.append(
                f"{decoder.num_kv_heads} KV heads do not divide over {sizes.num_devices} devices: each holds them all"
            )
        notes.extend(context_notes(config, self._model.decoder))
        notes.extend(quantization_notes(config, decoder, planned_chip(device)))
        if device.platform == "gpu" and device.runtime_share == GPU_SHARE:
            notes.append(f"takes {GPU_SHARE:.0%} of the GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION is set")
        return tuple(notes)


def _concurrency(limits: Limits, length: int) -> Concurrency:
    by_cache = (limits.num_blocks - 1) // -(-length // limits.spec.block_size)
    most = limits.buckets.max_num_seqs
    return Concurrency(length, min(by_cache, most), "kv" if by_cache < most else "max_num_seqs")


def _memory(fit: Fit, outcome: _Outcome | None) -> MemoryPart:
    held = fit.weights_bytes + fit.kv_bytes
    is_compiled = outcome is not None and outcome.peak_bytes > 0
    workspace = outcome.peak_bytes - held if outcome is not None and is_compiled else fit.workspace_bytes
    return MemoryPart(
        limit_bytes=fit.limit_bytes,
        weights_bytes=fit.weights_bytes,
        kv_bytes=fit.kv_bytes,
        workspace_bytes=workspace,
        workspace_is="compiled" if is_compiled else "estimated",
        free_bytes=fit.limit_bytes - held - workspace,
    )


def _program_part(memory: ProgramMemory) -> ProgramPart:
    return ProgramPart(**msgspec.structs.asdict(memory), peak_bytes=memory.peak_bytes)


def _whole_mib(num_bytes: int) -> int:
    return num_bytes >> 20 << 20
