"""Gets the memory that each program needs from the device's compiler, which runs in a separate process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import IO

import msgspec

from jaxserve.errors import StartupError
from jaxserve.runner.warmup import Progress
from jaxserve.tools.planning.job import CompileJob, ProgramMemory, ProgramRefused
from jaxserve.tools.planning.targets import TPU_ENVIRONMENT

Answer = ProgramMemory | ProgramRefused

_MODULE = "jaxserve.tools.planning.compile_process"
_MAX_LAST_WORDS = 400


def compile_programs(
    job: CompileJob, environment: Mapping[str, str], progress: Progress, *, module: str = _MODULE
) -> tuple[Answer, ...]:
    """Return one answer per program of `job`, in its order.

    environment: the variables of this process. The child gets no accelerator: it only compiles for one, and a server on
    the accelerator is not disturbed. Raises StartupError with one line if the compiling process dies.
    """
    child_environment = {**environment, **TPU_ENVIRONMENT, "JAX_PLATFORMS": "cpu"}
    found: dict[str, Answer] = {}
    progress(0, len(job.programs), "")
    with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as errors:
        question.write(msgspec.json.encode(job))
        question.seek(0)
        for answer in _answers(question, child_environment, errors, module):
            found[answer.name] = answer
            progress(len(found), len(job.programs), answer.name)
        if len(found) < len(job.programs):
            raise StartupError(f"the compiler for {job.device.title} died: {_last_words(errors)}")
    return tuple(found[program.name] for program in job.programs)


def _answers(question: IO[bytes], environment: Mapping[str, str], errors: IO[bytes], module: str) -> Iterator[Answer]:
    command = [sys.executable, "-m", module]
    with subprocess.Popen(
        command, stdin=question, stdout=subprocess.PIPE, stderr=errors, env=dict(environment)
    ) as process:
        assert process.stdout is not None, "stdout is a pipe"
        try:
            for line in process.stdout:
                yield msgspec.json.decode(line, type=Answer)
        except BaseException:  # the caller is gone
            process.kill()
            raise


def _last_words(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:_MAX_LAST_WORDS] if lines else "no word on stderr"
