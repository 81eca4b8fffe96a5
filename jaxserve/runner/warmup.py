"""Makes every program before the first request, from the cache or by the compiler, and runs each once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.skeleton import ModelSkeleton
from jaxserve.runner.inputs import Program
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.program_key import host_facts, program_key
from jaxserve.runner.runner import Runner
from jaxserve.runner.steps import abstract_params, lower, lower_upkeep
from jaxserve.runner.upkeep import Keeping, Upkeep, upkeep_programs
from jaxserve.sampling.params import SamplingParams, device_row
from jaxserve.scheduler.plan import MAX_STOP_TOKENS, StepPlan
from jaxserve.sharding.mesh import Sharding
from jaxserve.types import RequestId

P = TypeVar("P", Program, Upkeep)

REHEARSED_ROWS = 4
REHEARSED_CHUNK = 8
"""Tokens. Enough for the kernels of single rows and those of several; a page holds them."""

Progress = Callable[[int, int, str], None]
"""Called with (programs done, programs in all, name of the one just done)."""


@dataclass(frozen=True, slots=True)
class MadeProgram:
    """An executable, where it came from, and the wall-clock seconds that took beside the others."""

    compiled: jax.stages.Compiled
    key: str
    source: Literal["cache", "compiled"]
    seconds: float


def make_programs(
    skeleton: ModelSkeleton,
    sharding: Sharding,
    pool_shape: tuple[int, ...],
    kv_dtype: jnp.dtype,
    wanted: Sequence[Program],
    cache: ProgramCache,
    *,
    num_threads: int,
    progress: Progress,
) -> dict[Program, MadeProgram]:
    """An executable for every wanted program of a decoder that generates."""
    params = abstract_params(skeleton, sharding)
    key = program_key(
        host_facts(), skeleton.config, skeleton.policy, skeleton.adapters, params, sharding, pool_shape, kv_dtype
    )

    def lower_one(program: Program) -> jax.stages.Lowered:
        return lower(skeleton, sharding, program, pool_shape, kv_dtype)

    return compile_all(lower_one, key, sharding, wanted, cache, num_threads=num_threads, progress=progress)


def make_upkeep(keeping: Keeping, sharding: Sharding, cache: ProgramCache) -> dict[Upkeep, MadeProgram]:
    """The programs between steps. They are small: one thread makes them in less than a second."""

    def lower_one(program: Upkeep) -> jax.stages.Lowered:
        return lower_upkeep(sharding, program)

    return compile_all(
        lower_one,
        program_key(host_facts(), sharding),
        sharding,
        upkeep_programs(keeping),
        cache,
        num_threads=1,
        progress=lambda *_: None,
    )


def compile_all(
    lower_one: Callable[[P], jax.stages.Lowered],
    common_key: str,
    sharding: Sharding,
    wanted: Sequence[P],
    cache: ProgramCache,
    *,
    num_threads: int,
    progress: Progress,
) -> dict[P, MadeProgram]:
    """An executable for every wanted program. XLA releases the GIL, so threads compile or load side by side.

    common_key: over everything that decides what these programs do, but the program itself.
    """

    def make(program: P) -> MadeProgram:
        started = time.monotonic()
        key = program_key({}, common_key, program)
        compiled = cache.load(key, sharding.devices)
        if compiled is not None:
            return MadeProgram(compiled, key, "cache", time.monotonic() - started)
        compiled = lower_one(program).compile()
        cache.store(key, compiled)
        return MadeProgram(compiled, key, "compiled", time.monotonic() - started)

    made: dict[P, MadeProgram] = {}
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="compile")
    try:
        futures = {pool.submit(make, program): program for program in wanted}
        progress(0, len(wanted), "")
        for future in as_completed(futures):
            program = futures[future]
            made[program] = future.result()
            progress(len(made), len(wanted), program.name)
    finally:
        pool.shutdown(cancel_futures=True)
    return made


def executables(made: Mapping[P, MadeProgram]) -> dict[P, jax.stages.Compiled]:
    """What runs them."""
    return {program: result.compiled for program, result in made.items()}


def run_once(runner: Runner, wanted: Sequence[Program], progress: Progress) -> None:
    """Run every program on a few made-up tokens, whose keys and values go to the null page.

    The first run of an executable is slower than later ones: kernels are prepared for its shapes, and its scratch
    memory is touched for the first time (XLA:CPU's own matrix kernels need 0.5 s here for a model of 30 layers).
    """
    progress(0, len(wanted), "")
    for done, program in enumerate(wanted, start=1):
        runner.submit(rehearsal_plan(program)).result()
        progress(done, len(wanted), program.name)


def rehearsal_plan(program: Program) -> StepPlan:
    """A step of no request: a few rows of one token and, in mixed programs, a chunk. Its samples are not kept."""
    num_rows = min(program.num_rows, REHEARSED_ROWS)
    counts = np.ones(num_rows, np.int32)
    if program.kind == "mixed":
        counts[-1] = min(program.num_tokens - num_rows + 1, REHEARSED_CHUNK)
    return StepPlan(
        kind=program.kind,
        bucket=program.num_tokens,
        request_ids=tuple(RequestId(f"rehearsal-{row}") for row in range(num_rows)),
        slots=np.arange(num_rows, dtype=np.int32),
        num_scheduled_tokens=counts,
        num_computed_tokens=np.zeros(num_rows, np.int32),
        token_ids=np.zeros(counts.sum(), np.int32),
        block_tables=np.zeros((num_rows, program.max_pages), np.int32),
        is_sampling=np.zeros(num_rows, np.bool_),
        sampling=np.tile(device_row(SamplingParams()), (num_rows, 1)),
        length_limits=np.full(num_rows, np.iinfo(np.int32).max, np.int32),
        stop_token_ids=np.full((num_rows, MAX_STOP_TOKENS), -1, np.int32),
        num_top_logprobs=0,
    )
