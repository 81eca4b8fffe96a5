"""Makes programs from the cache or by the compiler, and runs each once before the first request; counts compilations."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeVar

import jax

from jaxserve.layers.cache import CacheShapes
from jaxserve.models.skeleton import EncoderSkeleton, ModelSkeleton
from jaxserve.runner.compiler_options import compiler_options
from jaxserve.runner.images.programs import ROW_KINDS, dummy_items
from jaxserve.runner.inputs import Program, StepTask
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.program_key import host_key_parts, process_key_parts, program_key
from jaxserve.runner.runner import Runner
from jaxserve.runner.state import StateProgram, StateShapes, state_programs
from jaxserve.runner.steps import abstract_params, lower, lower_state
from jaxserve.sharding.mesh import Sharding

P = TypeVar("P", Program, StateProgram)

Progress = Callable[[int, int, str], None]
"""Called with (programs done, programs in all, name of the one just done)."""


@dataclass(frozen=True, slots=True)
class MadeProgram:
    """An executable, its source, and the wall-clock seconds it took, beside the others."""

    compiled: jax.stages.Compiled
    key: str
    source: Literal["cache", "compiled"]
    seconds: float


def make_programs(
    task: StepTask[Any, Any],
    skeleton: ModelSkeleton | EncoderSkeleton,
    sharding: Sharding,
    shapes: CacheShapes | None,
    wanted: Sequence[Program],
    cache: ProgramCache,
    *,
    num_threads: int,
    progress: Progress,
) -> dict[Program, MadeProgram]:
    """Load or compile the wanted step programs."""

    def lower_one(program: Program) -> jax.stages.Lowered:
        return lower(skeleton, sharding, program, shapes, task)

    key = _common_key(task, skeleton, sharding, shapes)
    return compile_all(lower_one, key, sharding, wanted, cache, num_threads=num_threads, progress=progress)


def cached_programs(
    task: StepTask[Any, Any],
    skeleton: ModelSkeleton | EncoderSkeleton,
    sharding: Sharding,
    shapes: CacheShapes | None,
    wanted: Sequence[Program],
    cache: ProgramCache,
) -> frozenset[Program]:
    """Return those of the wanted step programs that the cache of this host has."""
    key = _common_key(task, skeleton, sharding, shapes)
    return frozenset(each for each in wanted if cache.num_bytes(program_key({}, key, each)) is not None)


def _common_key(
    task: StepTask[Any, Any],
    skeleton: ModelSkeleton | EncoderSkeleton,
    sharding: Sharding,
    shapes: CacheShapes | None,
) -> str:
    """Return the part of the keys of step programs that all of an engine share."""
    model = (skeleton.config, skeleton.policy, skeleton.adapters, abstract_params(skeleton, sharding))
    return program_key(host_key_parts() | process_key_parts(), task.name, *model, sharding, shapes)


def make_state_programs(
    shapes: StateShapes, sharding: Sharding, cache: ProgramCache
) -> dict[StateProgram, MadeProgram]:
    """Load or compile the state programs. They are small: one thread makes them in less than a second."""

    def lower_one(program: StateProgram) -> jax.stages.Lowered:
        return lower_state(sharding, program)

    return compile_all(
        lower_one,
        program_key(host_key_parts() | process_key_parts(), sharding),
        sharding,
        state_programs(shapes),
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
    """Load or compile every wanted program. XLA releases the GIL, so threads compile or load side by side.

    common_key: covers everything that decides what these programs compute, except the program itself.
    """
    options = compiler_options(sharding.devices[0].platform, cache)
    keys = {program.name: program_key({}, common_key, program) for program in wanted}
    made: dict[P, MadeProgram] = {}
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix=_COMPILE_THREADS)

    def load(program: P) -> MadeProgram | None:
        started, key = time.monotonic(), keys[program.name]
        compiled = cache.load(key, sharding.devices)
        return None if compiled is None else MadeProgram(compiled, key, "cache", time.monotonic() - started)

    def compile_one(program: P) -> MadeProgram:
        started, key = time.monotonic(), keys[program.name]
        compiled = lower_one(program).compile(options)
        cache.store(key, compiled)
        return MadeProgram(compiled, key, "compiled", time.monotonic() - started)

    def make(one: Callable[[P], MadeProgram | None], programs: Sequence[P]) -> None:
        futures = {pool.submit(one, program): program for program in programs}
        for future in as_completed(futures):
            program = futures[future]
            if (result := future.result()) is not None:
                made[program] = result
                progress(len(made), len(wanted), program.name)

    try:
        progress(0, len(wanted), "")
        make(load, wanted)
        loaded = [program.name for program in wanted if program in made]
        usable = cache.loaded_by_all(f"cached programs: {', '.join(keys)}", loaded)
        made = {program: result for program, result in made.items() if program.name in usable}
        make(compile_one, [program for program in wanted if program not in made])
    finally:
        pool.shutdown(cancel_futures=True)
    return made


def executables(made: Mapping[P, MadeProgram]) -> dict[P, jax.stages.Compiled]:
    return {program: result.compiled for program, result in made.items()}


def warm_up(
    runner: Runner[Any, Any], task: StepTask[Any, Any], wanted: Sequence[Program], platform: str, progress: Progress
) -> None:
    """Run every program on a dummy plan.

    The first run of an executable is slower than later ones: kernels are prepared for its shapes, and its scratch
    memory is touched for the first time (XLA:CPU's own matmul kernels need 0.5 s here for a model of 30 layers). On GPUs
    the second one is as well: XLA starts a program piece by piece at first, and makes its CUDA graph when it runs again.
    """
    progress(0, len(wanted), "")
    for done, program in enumerate(wanted, start=1):
        for _ in range(_WARM_UPS.get(platform, 1)):
            runner.submit(_dummy_plan(task, program, wanted)).result()
        progress(done, len(wanted), program.name)


def _dummy_plan(task: StepTask[Any, Any], program: Program, wanted: Sequence[Program]) -> Any:
    """Return a plan that runs `program`; rows of embeddings are filled before a step."""
    if program.kind not in ROW_KINDS:
        return task.dummy_plan(program)
    step = next(each for each in reversed(wanted) if each.kind not in ROW_KINDS)
    return replace(task.dummy_plan(step), **dummy_items(program))


_WARM_UPS: Final = {"gpu": 2}
"""Runs before the first request, by platform; one where nothing is said."""


_COMPILE_THREADS: Final = "compile"
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_LOG = logging.getLogger(__name__)

Phase = Literal["warmup", "serving"]


class CompilationCounter:
    """Listens to JAX's own compile events from construction to `close`.

    Programs of `compile_all` count as those of the warm-up at any time: no step waits for them.
    """

    def __init__(self) -> None:
        self.phase: Phase = "warmup"
        self.counts: dict[str, int] = {"warmup": 0, "serving": 0}
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event != _COMPILE_EVENT:
            return
        is_made_ahead = threading.current_thread().name.startswith(_COMPILE_THREADS)
        phase: Phase = "warmup" if is_made_ahead else self.phase
        self.counts[phase] += 1
        if phase == "serving":
            _LOG.error("a program was compiled while serving (%.2f s): this is a bug, please report it", duration_secs)

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)
