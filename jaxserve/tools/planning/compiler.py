"""Gets the memory that each program needs from the device's compiler, which runs in a separate process.

The process gets one CompileJob, pickled, and answers with one line of JSON per program.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO

import msgspec

from jaxserve.config import Config
from jaxserve.errors import StartupError
from jaxserve.layers.cache import CacheShapes
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.runner.inputs import Program
from jaxserve.runner.warmup import Progress
from jaxserve.tools.planning.collectives import Collective
from jaxserve.tools.planning.devices import Device
from jaxserve.tools.planning.targets import TPU_ENVIRONMENT

_MODULE = "jaxserve.tools.planning.compile_process"
_MAX_LAST_WORDS = 400


class CompileJob(msgspec.Struct, frozen=True):
    """Programs to compile for an engine that is not started."""

    config: Config
    device: Device
    decoder: DecoderConfig
    shapes: CacheShapes
    programs: tuple[Program, ...]


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """Bytes that one program needs on one device, from the compiler."""

    name: str
    argument_bytes: int
    """Weights, KV pool and packed input in the device's layout."""
    output_bytes: int
    aliased_bytes: int
    """Part of the output that reuses the arguments' buffers: the KV pool."""
    temp_bytes: int
    code_bytes: int
    peak_bytes: int
    """Bytes in use while the program runs: the sum of the others, less the aliased ones."""
    collectives: tuple[Collective, ...] = ()
    """Collectives in the compiled program; their names are empty."""


Answers = dict[str, ProgramMemory | str]
"""Memory of each program by its name, or the reason why the compiler rejects it: most often memory ran out."""


def compile_programs(
    job: CompileJob, environment: Mapping[str, str], progress: Progress, *, module: str = _MODULE
) -> Answers:
    """Return the answers for the programs of `job`, in its order.

    environment: the variables of this process. The child gets no accelerator: it only compiles for one, and a server on
    the accelerator is not disturbed. Raises StartupError with one line if the compiling process dies.
    """
    child_environment = {**environment, **TPU_ENVIRONMENT, "JAX_PLATFORMS": "cpu"}
    found: Answers = {}
    progress(0, len(job.programs), "")
    try:
        with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as errors:
            question.write(pickle.dumps(job))
            question.seek(0)
            for answer in _answers(question, child_environment, errors, module):
                found |= answer
                progress(len(found), len(job.programs), *answer)
            if len(found) < len(job.programs):
                raise StartupError(f"the compiler for {job.device.title} died: {_last_words(errors)}")
    except OSError as error:  # most often a full disk
        raise StartupError(f"the compiler for {job.device.title} cannot be run: {error.strerror}") from error
    return {program.name: found[program.name] for program in job.programs}


def _answers(question: IO[bytes], environment: Mapping[str, str], errors: IO[bytes], module: str) -> Iterator[Answers]:
    command = [sys.executable, "-m", module]
    with subprocess.Popen(command, stdin=question, stdout=subprocess.PIPE, stderr=errors, env=environment) as process:
        assert process.stdout is not None, "stdout is a pipe"
        try:
            for line in process.stdout:
                yield msgspec.json.decode(line, type=Answers)
        except BaseException:  # the caller is gone
            process.kill()
            raise


def _last_words(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:_MAX_LAST_WORDS] if lines else "no word on stderr"
