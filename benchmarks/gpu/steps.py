"""Whole steps of a model with random weights, by the programs and the runner of the server."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp

from benchmarks.gpu.ahead import DISTURBED
from benchmarks.gpu.context import Context
from benchmarks.gpu.plans import Rows, beside_a_chunk, decoding_rows, prompt_chunks
from benchmarks.gpu.random_weights import device_leaves
from benchmarks.gpu.rig import BLOCK_SIZE, Compiled, Rig
from benchmarks.gpu.shapes import LLAMA_1B, LLAMA_8B, TINY, decoder
from jaxserve.kv.spec import KVSpec
from jaxserve.layers.policy import DtypePolicy, plain
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.skeleton import make_skeleton
from jaxserve.runner.inputs import Program, dummy_plan, programs
from jaxserve.runner.runner import PendingStep, Runner
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.scheduler.plan import Buckets, StepPlan, StepResult
from jaxserve.tools.planning.roofline import decode_bound, prefill_bound
from jaxserve.tools.planning.sizes import make_sizes

MARGIN = 128
"""Tokens that a row may grow by while a cell is measured."""
WORKSPACE_BYTES = 8 << 30
LEAST_POOL_BYTES = 1 << 30
CELL_S = 2.0
MIN_STEPS, MAX_STEPS = 3, 32
MIXED_STEPS = 4
FIRST_PROGRAMS = 3
"""Decode programs that are compiled before the one for prompts."""
NUM_WARM_UPS = 2
"""A CUDA graph is made in the second run of a program."""


def measured_model(context: Context) -> tuple[DecoderConfig, str]:
    """Return the shape of Llama-3.1-8B, or of Llama-3.2-1B on a device without room for it, and how results call it."""
    if context.is_quick:
        return decoder(TINY), ""
    large = decoder(LLAMA_8B)
    weight_bytes = make_sizes(make_skeleton(large, plain(jnp.dtype(jnp.bfloat16)))).weights_bytes
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is None or limit >= weight_bytes + WORKSPACE_BYTES + LEAST_POOL_BYTES:
        return large, ""
    context.recorder.note(f"{limit / 1e9:.0f} GB are too few for Llama-3.1-8B in bfloat16: the model is Llama-3.2-1B")
    return decoder(LLAMA_1B), "1B, "


def pool_blocks(
    decoder: DecoderConfig, kv_dtype: jnp.dtype, weight_bytes: int, cells: Iterable[tuple[int, int]]
) -> int:
    """Return the pages for the largest of `cells` (rows, tokens of a row) that the device has room for. Raises MemoryError if there is
    none."""
    spec = KVSpec(decoder.num_layers, decoder.num_kv_heads, decoder.head_dim, kv_dtype.itemsize, BLOCK_SIZE)
    stats = jax.devices()[0].memory_stats() or {}
    needs = [rows * -(-(tokens + MARGIN) // BLOCK_SIZE) + 1 for rows, tokens in cells]
    if "bytes_limit" in stats:
        room = (stats["bytes_limit"] - weight_bytes - WORKSPACE_BYTES) // spec.bytes_per_block
        needs = [need for need in needs if need <= room]
    if not needs:
        raise MemoryError(f"no room for keys and values beside {weight_bytes / 1e9:.1f} GB of weights and a workspace")
    return int(max(needs))


class StepBench:
    """One model, its programs and a runner over them."""

    def __init__(
        self,
        context: Context,
        decoder: DecoderConfig,
        policy: DtypePolicy,
        *,
        label: str,
        batches: tuple[int, ...],
        chunk: int | None,
        cells: list[tuple[int, int]],
        compile_s: float,
        kv_dtype: jnp.dtype | None = None,
        is_loaded: bool = True,
    ) -> None:
        """Compile, then make weights and pool: the compiler tries out kernels and wants memory for it.

        cells: (rows, tokens of a row) to come; chunk: tokens of a prefill step, or None. batches: the programs that come
        first are compiled first. Page tables are as wide as those of a server with default settings. is_loaded: False
        leaves weights and pool to `load`. kv_dtype: of the pool; None: the weights'.
        """
        self._context = context
        self._label = label
        self._sizes = make_sizes(make_skeleton(decoder, policy))
        num_blocks = pool_blocks(decoder, kv_dtype or policy.weights, self._sizes.weights_bytes, cells)
        self.rig = Rig(decoder, policy, num_blocks=num_blocks, max_model_len=decoder.max_position, kv_dtype=kv_dtype)
        mixed = () if chunk is None else (chunk,)
        decode = tuple(dict.fromkeys(max(batch, 2) for batch in batches))  # as the server does (runner/limits.py)
        wanted = programs(Buckets(decode=decode, mixed=mixed, max_num_seqs=max(decode)), self.rig.max_pages)
        order = [*decode[:FIRST_PROGRAMS], *mixed, *decode[FIRST_PROGRAMS:]]
        self.made = self.compile(sorted(wanted, key=lambda each: order.index(each.num_tokens)), compile_s)
        if is_loaded:
            self.load()

    def load(self) -> None:
        """Make weights and pool, and run every program as a warm-up does."""
        context = self._context
        started_s = time.perf_counter()
        self.params = jax.block_until_ready(device_leaves(self.rig.skeleton, self.rig.sharding, context.seed))
        weights_s = time.perf_counter() - started_s
        self.runner = self.rig.runner(self.params, self.made, pool_seed=context.seed)
        for program in self.made:
            for _ in range(NUM_WARM_UPS):
                self.runner.submit(dummy_plan(program)).result()
        stats = jax.devices()[0].memory_stats() or {}
        context.recorder.figure(
            "memory",
            model=self._label,
            attention=self.rig.skeleton.policy.backend,
            weights_gib=self._sizes.weights_bytes / 2**30,
            kv_tokens=(self.rig.num_blocks - 1) * BLOCK_SIZE,
            peak_gib=stats["peak_bytes_in_use"] / 2**30 if "peak_bytes_in_use" in stats else None,
            random_weights_s=weights_s,
        )

    def by_others(self, batches: Collection[int], compile_s: float) -> AbstractContextManager[None]:
        """Meanwhile decode steps have programs for so many rows and no others; same weights, a fresh pool."""
        most = max(program.num_slots for program in self.made)
        sizes = tuple(max(batch, 2) for batch in batches)
        wanted = programs(Buckets(decode=sizes, mixed=(), max_num_seqs=most), self.rig.max_pages)
        return self._by_programs(wanted, self.rig, self._label, compile_s)

    def by_reference(self, batches: Collection[int], compile_s: float) -> AbstractContextManager[None]:
        """Meanwhile decode steps of so many rows have their attention from XLA alone; same weights, a fresh pool."""
        wanted = [each for each in self.made if each.kind == "decode" and each.num_tokens in batches]
        return self._by_programs(wanted, self.rig.with_backend("reference"), f"{self._label}, reference", compile_s)

    @contextmanager
    def _by_programs(self, wanted: Collection[Program], rig: Rig, label: str, compile_s: float) -> Iterator[None]:
        """Meanwhile steps have these programs of `rig`. Raises TimeoutError if none was compiled in time."""
        kept = self.rig, self.made, self._label
        self.rig, self._label = rig, label
        try:
            self.made = self.compile(wanted, compile_s)
            if not self.made:
                raise TimeoutError(f"{label}: no program was compiled in time")
            self._renew_runner()
            yield
        finally:
            self.rig, self.made, self._label = kept
            self._renew_runner()

    def _renew_runner(self) -> None:
        self.release()
        self.runner = self.rig.runner(self.params, self.made, pool_seed=self._context.seed)

    def release(self) -> None:
        """Give the KV pool back: there is no room for two."""
        del self.runner
        gc.collect()

    def compile(self, wanted: Iterable[Program], timeout_s: float) -> dict[Program, Compiled]:
        """Return the programs that were compiled in time, each with the compiler's numbers."""
        wanted = list(wanted)
        made, is_disturbed = self.rig.compile(wanted, timeout_s)
        if is_disturbed:
            self._context.recorder.note(DISTURBED)
        for program in wanted:
            if program not in made:
                self._context.recorder.problem(program.name, f"not compiled within {timeout_s:.0f} s")
                continue
            memory = made[program].executable.memory_analysis()
            self._context.recorder.figure(
                "programs",
                model=self._label,
                program=program.name,
                steps_per_call=program.max_steps,
                compile_s=made[program].seconds,
                scratch_mib=None if memory is None else memory.temp_size_in_bytes / 2**20,
                **choices(made[program].executable.as_text() or ""),
            )
        return made

    def rows(self, made: Iterable[Program], count: int, tokens: int) -> Rows | None:
        """`count` rows for the smallest decode program that takes them; None, and a note, when the pool cannot."""
        fitting = [each for each in made if each.kind == "decode" and each.num_tokens >= count]
        program = min(fitting, key=lambda each: each.num_tokens, default=None)
        if program is None:
            raise LookupError(f"decode/{count} is not compiled")
        if count * -(-(tokens + MARGIN) // BLOCK_SIZE) >= self.rig.num_blocks:
            self._context.recorder.note(f"{self._label}: {count} rows of {tokens} tokens do not fit the memory")
            return None
        return decoding_rows(program, count, tokens + MARGIN, self.rig.num_blocks, self._context.seed)

    def mixed_step(self, count: int, tokens: int) -> None:
        """Time a prompt's chunk beside `count` rows that decode with `tokens` each; without rows: the chunk alone."""
        program = next((each for each in self.made if each.kind == "mixed"), None)
        rows = self.rows(self.made, max(count, 1), tokens)
        if program is None or rows is None:
            raise LookupError("no mixed program is compiled, or the rows do not fit the memory")
        rows = replace(rows, tables=rows.tables[:count], ids=rows.ids[:count])
        plan = beside_a_chunk(rows, program, tokens - 1, self.rig.skeleton.config.vocab_size, self._context.seed)
        self.runner.submit(plan).result()
        started_s = time.perf_counter()
        pending = [self.runner.submit(plan) for _ in range(MIXED_STEPS)]
        pending[-1].result()
        self._context.recorder.figure(
            "mixed steps",
            model=self._label,
            tokens=program.num_tokens,
            decoding_rows=count,
            context=tokens,
            step_ms=(time.perf_counter() - started_s) / MIXED_STEPS * 1e3,
        )

    def sampled_step(self, count: int, tokens: int, top_p: float) -> None:
        """Time decode steps whose rows all sample, beside the greedy ones."""
        rows = self.rows(self.made, count, tokens)
        if rows is None:
            return
        sampling = EngineSamplingParams(temperature=1.0, top_p=top_p)
        times_ms = []
        for each in (rows, replace(rows, sampling=sampling)):
            clock = DecodeSteps(self.runner, each, tokens - 1)
            clock.warm_up()
            times_ms.append(clock.stream(MAX_STEPS)[0] * 1e3)
        self._context.recorder.figure(
            "sampled steps",
            model=self._label,
            batch=count,
            context=tokens,
            top_p=top_p,
            greedy_ms=times_ms[0],
            step_ms=times_ms[1],
        )

    def decode_step(self, count: int, tokens: int) -> None:
        """Time decode steps of `count` rows with `tokens` each."""
        rows = self.rows(self.made, count, tokens)
        if rows is None:
            return
        clock = DecodeSteps(self.runner, rows, tokens - 1)
        first_s = clock.warm_up()
        num_steps = max(MIN_STEPS, min(MAX_STEPS, int(CELL_S / 3 / first_s)))
        stream_s, submit_s = clock.stream(num_steps)
        overlapped_s, synchronous_s = clock.overlapped(num_steps), clock.synchronous(num_steps)
        bounds, bound = self._context.bounds, None
        if bounds is not None:
            itemsize = self.rig.kv_dtype.itemsize
            bound = decode_bound(self._sizes, bounds.rates, itemsize, count, tokens, fits=True)
        self._context.recorder.figure(
            "decode steps",
            model=self._label,
            batch=count,
            context=tokens,
            step_ms=stream_s * 1e3,
            bound_ms=None if bound is None else bound.step_s * 1e3,
            of_bound=None if bound is None else bound.step_s / stream_s,
            tok_per_s=count / overlapped_s,
            overlapped_ms=overlapped_s * 1e3,
            synchronous_ms=synchronous_s * 1e3,
            submit_ms=submit_s * 1e3,
        )

    def prefill(self, length: int) -> None:
        """Time a prompt, chunk by chunk."""
        program = next((each for each in self.made if each.kind == "mixed"), None)
        if program is None:
            raise LookupError("no mixed program is compiled")
        plans = prompt_chunks(program, length, self.rig.skeleton.config.vocab_size, self._context.seed)
        seconds = []
        for _ in range(MIN_STEPS + 1):
            started_s = time.perf_counter()
            pending = [self.runner.submit(plan) for plan in plans]
            pending[-1].result()
            seconds.append(time.perf_counter() - started_s)
        median_s = statistics.median(seconds[1:])
        bounds = self._context.bounds
        bound = None if bounds is None else prefill_bound(self._sizes, bounds.rates, length, program.num_tokens)
        self._context.recorder.figure(
            "prefill",
            model=self._label,
            prompt=length,
            chunk=program.num_tokens,
            ms=median_s * 1e3,
            tok_per_s=length / median_s,
            bound_ms=None if bound is None else bound.seconds * 1e3,
            of_bound=None if bound is None else bound.seconds / median_s,
        )


def choices(text: str) -> dict[str, int]:
    """Return what a compiled program computes its matmuls and attention with: the number of calls of each kind."""
    return {
        "loops": text.count(" while("),
        "cublas": text.count('custom_call_target="__cublas$gemm"'),
        "cublas_lt": text.count('custom_call_target="__cublas$lt$matmul'),
        "triton_gemm": text.count('"kind":"__triton_gemm"') + text.count('"kind":"__triton_nested_gemm_fusion"'),
        "cudnn": text.count('custom_call_target="__cudnn$'),
        "pallas": len(re.findall(r'custom_call_target="mosaic_gpu', text)),
    }


class DecodeSteps:
    """Decode steps of the same rows, one token further each."""

    def __init__(self, runner: Runner[StepPlan, StepResult], rows: Rows, num_computed: int) -> None:
        self._runner = runner
        self._rows = rows
        self._num_computed = num_computed

    def submit(self, *, has_slots: bool = True) -> PendingStep[StepPlan, StepResult]:
        """Dispatch the next step."""
        plan = self._rows.step(self._num_computed, has_slots=has_slots)
        self._num_computed += 1
        return self._runner.submit(plan)

    def warm_up(self) -> float:
        """Two steps; what the second one took."""
        self.submit(has_slots=False).result()
        started_s = time.perf_counter()
        self.submit().result()
        return time.perf_counter() - started_s

    def stream(self, count: int) -> tuple[float, float]:
        """Nothing is read before the last step: seconds of a step, and of handing one over."""
        submits = []
        started_s = time.perf_counter()
        for _ in range(count):
            before_s = time.perf_counter()
            pending = self.submit()
            submits.append(time.perf_counter() - before_s)
        pending.result()
        return (time.perf_counter() - started_s) / count, statistics.median(submits)

    def overlapped(self, count: int) -> float:
        """Each step is read after the next one was handed over, as the engine does it."""
        started_s = time.perf_counter()
        pending = self.submit()
        for _ in range(count - 1):
            later = self.submit()
            pending.result()
            pending = later
        pending.result()
        return (time.perf_counter() - started_s) / count

    def synchronous(self, count: int) -> float:
        """Each step is read before the next one is handed over."""
        started_s = time.perf_counter()
        for _ in range(count):
            self.submit().result()
        return (time.perf_counter() - started_s) / count
