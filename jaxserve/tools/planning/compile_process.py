"""Compiles for a described device: `python -m jaxserve.tools.planning.compile_process`, started by `planning.compiler`.

stdin     one CompileJob, pickled
stdout    a line per program when it is done: its Answers
exit      0 all were tried; else a traceback on stderr gives the reason

It is a separate process because a compiler may abort instead of raising, and reads its environment when it is loaded.
"""

from __future__ import annotations

import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax
import msgspec

from jaxserve.models.skeleton import make_skeleton
from jaxserve.runner.compiler_options import compiler_options
from jaxserve.runner.host.cores import num_cores
from jaxserve.runner.inputs import Program
from jaxserve.runner.limits import mesh_shape
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.speculation.model import with_drafter
from jaxserve.runner.speculation.task import engine_task
from jaxserve.runner.steps import lower
from jaxserve.sharding.mesh import make_sharding
from jaxserve.tools.planning.adapters import planned_adapters
from jaxserve.tools.planning.collectives import compiled_collectives
from jaxserve.tools.planning.compiler import CompileJob, ProgramMemory
from jaxserve.tools.planning.fit import planned_draft, planned_policy
from jaxserve.tools.planning.targets import described_devices

_MAX_REASON = 300


def main() -> int:
    """Read a job, compile its programs in parallel, and write each answer when it is ready."""
    job: CompileJob = pickle.load(sys.stdin.buffer)  # of the process that started this one
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of the compilers is no answer
        with ThreadPoolExecutor(min(num_cores(), 8), thread_name_prefix="compile") as pool:
            described_devices(job.device, job.config.parallel.num_devices)  # before jax is used: it sets their number
            names = {pool.submit(compile_program, job, program): program.name for program in job.programs}
            for future in as_completed(names):
                answers.write(msgspec.json.encode({names[future]: future.result()}) + b"\n")
                answers.flush()
    return 0


def compile_program(job: CompileJob, program: Program) -> ProgramMemory | str:
    """Return the memory of one program, or the compiler's rejection."""
    shape = mesh_shape(job.config.parallel)
    devices = described_devices(job.device, shape.num_devices)
    sharding = make_sharding(job.decoder, shape, devices)
    policy = planned_policy(job.config, job.decoder, job.device)
    draft = planned_draft(job.config, job.decoder, job.device)
    decoder = job.decoder if draft is None else with_drafter(job.config, job.decoder, draft.skeleton.config)
    skeleton = make_skeleton(decoder, policy, planned_adapters(job.config, job.decoder))
    task = engine_task(job.config, job.decoder, job.device.platform, draft)
    # Mosaic GPU asks the default device for the architecture that it compiles for.
    with jax.default_device(devices[0] if job.device.platform == "gpu" else None):
        lowered = lower(skeleton, sharding, program, job.shapes, task)
    try:
        compiled = lowered.compile(compiler_options(job.device.platform, ProgramCache(None)))
    except jax.errors.JaxRuntimeError as error:
        return (str(error).splitlines() or ["no reason given"])[0][:_MAX_REASON]
    memory = compiled.memory_analysis()
    if memory is None:
        return "the compiler gives no memory analysis"
    arguments, output, aliased = (
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
    )
    temp, code = memory.temp_size_in_bytes, memory.generated_code_size_in_bytes
    peak = arguments + output - aliased + temp + code
    found = compiled_collectives(compiled.as_text() or "")
    return ProgramMemory(program.name, arguments, output, aliased, temp, code, peak, found)


if __name__ == "__main__":
    sys.exit(main())
