"""Makes every program before the first request: from the cache, or lowered and compiled in parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax
import jax.numpy as jnp

from jaxserve.models.skeleton import ModelSkeleton
from jaxserve.runner.inputs import Program
from jaxserve.runner.program_cache import ProgramCache, program_key
from jaxserve.runner.steps import lower
from jaxserve.sharding.mesh import Sharding

Progress = Callable[[int, int, str], None]
"""Called with (programs done, programs in all, name of the one just done)."""


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
) -> dict[Program, jax.stages.Compiled]:
    """An executable for every wanted program. XLA releases the GIL, so threads compile side by side."""

    def make(program: Program) -> jax.stages.Compiled:
        key = program_key(skeleton.config, skeleton.dtype, sharding, pool_shape, kv_dtype, program)
        in_tree = jax.tree.structure(((tuple(range(len(skeleton.leaves))), 0, 0, 0), {}))
        compiled = cache.load(key, in_tree, jax.tree.structure((0, 0, 0)), sharding.devices)
        if compiled is None:
            compiled = lower(skeleton, sharding, program, pool_shape, kv_dtype).compile()
            cache.store(key, compiled)
        return compiled

    made: dict[Program, jax.stages.Compiled] = {}
    with ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as pool:
        futures = {pool.submit(make, program): program for program in wanted}
        progress(0, len(wanted), "")
        for future in as_completed(futures):
            program = futures[future]
            made[program] = future.result()
            progress(len(made), len(wanted), program.name)
    return made
