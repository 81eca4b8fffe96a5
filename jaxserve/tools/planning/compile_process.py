"""Compiles for a described device: `python -m jaxserve.tools.planning.compile_process`, started by `planning.compiler`.

stdin     one CompileJob
stdout    a line per program when it is done: ProgramMemory or ProgramRefused
exit      0 all were tried; else a traceback on stderr gives the reason

It is a separate process because a compiler may abort instead of raising, and reads its environment when it is loaded.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax
import jax.numpy as jnp
import msgspec

from jaxserve.models.skeleton import make_skeleton
from jaxserve.runner.inputs import Program
from jaxserve.runner.steps import lower
from jaxserve.sharding.mesh import make_sharding
from jaxserve.tools.planning.fit import planned_policy
from jaxserve.tools.planning.job import CompileJob, ProgramMemory, ProgramRefused
from jaxserve.tools.planning.targets import described_devices

_MAX_REASON = 300


def main() -> int:
    """Read a job, compile its programs in parallel, and write each answer when it is ready."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=CompileJob)
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of the compilers is no answer
        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), 8), thread_name_prefix="compile") as pool:
            for future in as_completed([pool.submit(compile_program, job, program) for program in _ready(job)]):
                answers.write(msgspec.json.encode(future.result()) + b"\n")
                answers.flush()
    return 0


def compile_program(job: CompileJob, program: Program) -> ProgramMemory | ProgramRefused:
    """Return the memory of one program, or the compiler's rejection."""
    num_devices = job.config.parallel.tensor_parallel_size
    sharding = make_sharding(job.decoder, num_devices, described_devices(job.device, num_devices))
    skeleton = make_skeleton(job.decoder, planned_policy(job.config, job.decoder, job.device))
    lowered = lower(skeleton, sharding, program, job.pool_shape, jnp.dtype(job.kv_dtype))
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return ProgramRefused(program.name, (str(error).splitlines() or ["no reason given"])[0][:_MAX_REASON])
    memory = compiled.memory_analysis()
    if memory is None:
        return ProgramRefused(program.name, "the compiler gives no memory analysis")
    return ProgramMemory(
        name=program.name,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
    )


def _ready(job: CompileJob) -> tuple[Program, ...]:
    """Return the programs. The number of devices is set first: it cannot change after the first use of jax."""
    described_devices(job.device, job.config.parallel.tensor_parallel_size)
    return job.programs


if __name__ == "__main__":
    sys.exit(main())
