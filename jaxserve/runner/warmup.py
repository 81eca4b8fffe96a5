"""Makes every program before the first request: from the cache, or lowered and compiled in parallel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from jaxserve.models.skeleton import ModelSkeleton
from jaxserve.runner.inputs import Program
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.program_key import host_facts, program_key
from jaxserve.runner.steps import abstract_params, lower
from jaxserve.sharding.mesh import Sharding

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
    """An executable for every wanted program. XLA releases the GIL, so threads compile or load side by side."""
    facts = host_facts()
    arguments = (skeleton.config, skeleton.numerics, abstract_params(skeleton, sharding), sharding, pool_shape, kv_dtype)

    def make(program: Program) -> MadeProgram:
        started = time.monotonic()
        key = program_key(facts, *arguments, program)
        compiled = cache.load(key, sharding.devices)
        if compiled is not None:
            return MadeProgram(compiled, key, "cache", time.monotonic() - started)
        compiled = lower(skeleton, sharding, program, pool_shape, kv_dtype).compile()
        cache.store(key, compiled)
        return MadeProgram(compiled, key, "compiled", time.monotonic() - started)

    made: dict[Program, MadeProgram] = {}
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
