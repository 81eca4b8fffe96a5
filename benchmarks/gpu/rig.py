"""An engine over random weights: the server's own programs, runner, scheduler and loop, without a checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.backend import Backend

from benchmarks.gpu.ahead import stop_compiling
from benchmarks.gpu.random_weights import random_pool
from jaxserve.config import SchedulerConfig
from jaxserve.engine.core import EngineCore
from jaxserve.ipc.messages import AddRequest, ModelInfo, TokenLogprobs
from jaxserve.ipc.stats import EngineStats
from jaxserve.kv.manager import KVManager
from jaxserve.layers.cache import CacheShapes, pool_shapes
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.skeleton import make_skeleton
from jaxserve.runner.compiler_options import compiler_options
from jaxserve.runner.inputs import Program
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.runner import PendingStep, Runner
from jaxserve.runner.state import DeviceState, StateShapes
from jaxserve.runner.steps import generation_task, lower
from jaxserve.runner.warmup import executables, make_state_programs
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.scheduler.plan import Buckets, StepPlan, StepResult
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.tools.bench.offline import EngineTotals
from jaxserve.types import RequestId

BLOCK_SIZE = 16
MAX_COMPILE_THREADS = 8
"""Whole steps at a time: the first ones should be ready early, and the compiler has threads of its own."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """An executable, and the seconds it took beside the others."""

    executable: jax.stages.Compiled
    seconds: float


@dataclass
class Generation:
    """All that requests got, and what the engine says of its steps."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    totals: EngineTotals = field(default_factory=EngineTotals)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RunnerExecutor:
    """An executor over an existing runner."""

    runner: Runner[StepPlan, StepResult]
    model_info: ModelInfo
    buckets: Buckets
    eos_token_ids: frozenset[int] = frozenset()

    def submit(self, plan: StepPlan) -> PendingStep[StepPlan, StepResult]:
        return self.runner.submit(plan)

    @property
    def snapshots(self) -> None:
        """Nothing is copied to a tier."""

    @property
    def pages(self) -> None:
        """No tiers."""

    @property
    def weights(self) -> None:
        """No updates of the weights."""

    def add_stats(self, stats: EngineStats) -> None:
        """Count nothing."""

    def profile(self, is_on: bool) -> None:
        """Do nothing: there are no other hosts."""

    def close(self) -> None:
        """Do nothing: the caller owns the runner."""


class Rig:
    """One model's shapes; programs and runners are made over them."""

    def __init__(
        self,
        decoder: DecoderConfig,
        policy: DtypePolicy,
        *,
        num_blocks: int,
        max_model_len: int,
        kv_dtype: jnp.dtype | None = None,
    ) -> None:
        """kv_dtype: of the KV pool; None: the weights'."""
        self.skeleton = make_skeleton(decoder, policy)
        self.kv_dtype = kv_dtype or policy.weights
        self.sharding = make_sharding(decoder, MeshShape())
        self.task = generation_task(jax.devices()[0].platform)
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.pool_shape = (decoder.num_layers, num_blocks, decoder.num_kv_heads, BLOCK_SIZE, decoder.head_dim)

    def with_backend(self, backend: Backend) -> Rig:
        """Return the model with other kernels."""
        policy = replace(self.skeleton.policy, backend=backend, attention=None)
        return Rig(
            self.skeleton.config,
            policy,
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            kv_dtype=self.kv_dtype,
        )

    @property
    def shapes(self) -> CacheShapes:
        return pool_shapes(self.pool_shape, self.kv_dtype)

    @property
    def max_pages(self) -> int:
        return -(-self.max_model_len // BLOCK_SIZE)

    def place(self, leaves: Iterable[np.ndarray]) -> tuple[jax.Array, ...]:
        """Host arrays as the model's parameters."""
        return tuple(
            jax.device_put(array.astype(spec.dtype), self.sharding.place(spec.axes))
            for array, spec in zip(leaves, self.skeleton.arrays, strict=True)
        )

    def compile(self, wanted: Sequence[Program], timeout_s: float) -> tuple[dict[Program, Compiled], bool]:
        """Compile in parallel, in the order of `wanted`.

        Returns the programs that were compiled in time, and True if any still compiles.
        """

        options = compiler_options(jax.devices()[0].platform, ProgramCache(None))

        def make(program: Program) -> Compiled:
            started_s = time.perf_counter()
            lowered = lower(self.skeleton, self.sharding, program, self.shapes, self.task)
            executable = lowered.compile(options)
            return Compiled(executable, time.perf_counter() - started_s)

        threads = ThreadPoolExecutor(min(MAX_COMPILE_THREADS, len(os.sched_getaffinity(0))))
        futures = {threads.submit(make, program): program for program in wanted}
        is_disturbed = bool(stop_compiling(threads, futures, timeout_s))
        done = {future: program for future, program in futures.items() if future.done() and not future.cancelled()}
        return {program: future.result() for future, program in done.items()}, is_disturbed

    def runner(
        self, params: tuple[jax.Array, ...], made: Mapping[Program, Compiled], *, pool_seed: int | None = None
    ) -> Runner[StepPlan, StepResult]:
        """Return a runner over its own state. pool_seed: see `state`."""
        steps = {program: each.executable for program, each in made.items()}
        return Runner(self.task, params, self.state(made, pool_seed=pool_seed), steps)

    def state(self, made: Iterable[Program], *, pool_seed: int | None = None) -> DeviceState:
        """Return new state for these programs. pool_seed: fill the KV pool at random instead of with zeros."""
        num_slots = max(program.num_slots for program in made)
        num_pages = max(program.max_pages for program in made) if self.task.keeps_tables else 0
        shapes = StateShapes(self.shapes, num_slots, self.skeleton.config.vocab_size, num_pages)
        state = DeviceState(shapes, executables(make_state_programs(shapes, self.sharding, ProgramCache(None))))
        if pool_seed is not None:
            for half in jax.tree.leaves(state.arrays.cache):
                half.delete()
            pool = random_pool(self.pool_shape, self.kv_dtype, self.sharding, pool_seed)
            state.arrays = state.arrays._replace(cache=(pool,))
        return state

    def core(self, runner: Runner[StepPlan, StepResult], programs: Iterable[Program], *, depth: int = 1) -> EngineCore:
        """A fresh scheduler, which knows only `programs`, and a loop with `depth` steps in flight."""
        buckets = buckets_of(programs)
        vocab_size = self.skeleton.config.vocab_size
        model_info = ModelInfo(
            vocab_size=vocab_size,
            max_model_len=self.max_model_len,
            num_kv_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=buckets.max_num_seqs,
            kv_dtype=str(self.skeleton.policy.weights),
            platform=jax.devices()[0].platform,
            num_devices=1,
            fingerprint="",
        )
        executor = RunnerExecutor(runner, model_info, buckets)
        kv = KVManager(self.num_blocks, BLOCK_SIZE, self.max_model_len, enable_prefix_caching=False)
        config = SchedulerConfig(overlap=depth > 0, max_burst_ms=0.0)
        scheduler = Scheduler(config, kv, buckets, self.max_model_len, frozenset(), vocab_size)
        return EngineCore(scheduler, executor, depth=depth)


def buckets_of(programs: Iterable[Program]) -> Buckets:
    """The table that these programs make up."""
    programs = list(programs)
    sizes = {
        kind: tuple(sorted(each.num_tokens for each in programs if each.kind == kind)) for kind in ("decode", "mixed")
    }
    return Buckets(
        decode=sizes["decode"],
        mixed=sizes["mixed"],
        max_num_seqs=max(each.num_slots for each in programs),
        max_decode_steps=max(each.max_steps for each in programs),
    )


def greedy(
    name: str, prompt: Sequence[int] | np.ndarray, num_tokens: int, *, num_top_logprobs: int | None = None
) -> AddRequest:
    """A request for exactly `num_tokens` of the most likely tokens."""
    sampling = EngineSamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, num_top_logprobs=num_top_logprobs
    )
    return AddRequest(RequestId(name), [int(token) for token in prompt], sampling)


def generate(
    core: EngineCore, requests: Sequence[AddRequest], on_all_started: Callable[[], None] = lambda: None
) -> Generation:
    """All of them together, to the end. `on_all_started`: called once when each has its first token."""
    result = Generation(
        {request.request_id: [] for request in requests}, {request.request_id: [] for request in requests}
    )
    has_begun = False
    started_s = time.perf_counter()
    for request in requests:
        for output in core.handle(request):
            raise RuntimeError(f"{output.request_id} was refused: {output.error}")
    while core.has_work:
        step = core.step()
        if step is None:
            continue
        for output in step.outputs:
            if output.error is not None:
                raise RuntimeError(f"{output.request_id} failed: {output.error.message}")
            result.token_ids[output.request_id] += output.token_ids
            result.logprobs[output.request_id] += output.logprobs or []
        if step.stats is not None:
            result.totals.add(step.stats)
        if not has_begun and all(result.token_ids.values()):
            has_begun, result.totals = True, EngineTotals()
            on_all_started()
    result.seconds = time.perf_counter() - started_s
    return result
