"""Spawns the engine process. Imports little but the standard library, so that a server can do it first.

The engine process imports its modules while its parent imports others; then it waits for its EngineSpec.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jaxserve.runner.host.cgroup import oom_kills
from jaxserve.types import ACCELERATOR_FILES, GPU_SHARE, PRELOAD_FLAG

_MALLOC: Final = {"hugetlb": 1, "mmap_threshold": 256 << 20, "trim_threshold": 256 << 20}
_MOST_WITH_ONE_ARENA: Final = 4
"""Processors."""
_MOST_ARENAS: Final = 16
"""Each arena of malloc keeps the scratch memory of steps that took it from there."""

ENGINE_MODULE: Final = "jaxserve.engine.process"
WORKER_MODULE: Final = "jaxserve.engine.host_worker"


class Spawned(subprocess.Popen[bytes]):
    """A process that this one has spawned."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._oom_kills = oom_kills()  # before it can be killed itself
        super().__init__(*arguments, **options)

    @property
    def exit_text(self) -> str:
        """Return how an engine's process ended, in words that follow its name."""
        return exit_text(self.returncode, self._oom_kills, ", or lower --kv-cache-memory")


def exit_text(code: int | None, num_oom_kills: int, advice: str = "") -> str:
    """Return how a process ended, in words that follow its name.

    num_oom_kills: number of processes of this group that the kernel had killed for lack of memory before this one was started.
    advice: what to change instead of the memory limit.
    """
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    text = f"was ended by signal {-code}"
    if code == -signal.SIGKILL and oom_kills() > num_oom_kills:
        text += f" for lack of memory (raise the memory limit of its container{advice})"
    return text


def engine_environment(
    environ: Mapping[str, str], num_processors: int | None = None, devices: Path = Path("/dev")
) -> dict[str, str]:
    """Return further variables of an engine process with this environment.

    By default JAX leaves a quarter of a GPU unused. On CPUs the KV pool uses huge pages if the kernel gives them on request.
    A step's scratch memory of up to 64 MB stays allocated between steps: else the kernel maps and clears the same 40 MB at every
    step of 32 rows. On few processors malloc has one arena, which keeps larger ones as well. On many, compilers would wait
    for each other. Scratch memory of accelerators is their own: beside them malloc is as glibc has it.

    num_processors: those that it may use; None: as many as this process. devices: folder of the machine's device files.
    """
    share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(GPU_SHARE)}
    platform = environ.get("JAX_PLATFORMS", "").partition(",")[0]
    if platform != "cpu" and any(found for name in ACCELERATOR_FILES for found in devices.glob(name)):
        return share
    count = len(os.sched_getaffinity(0)) if num_processors is None else num_processors
    malloc = _MALLOC | {"arena_max": 1 if count <= _MOST_WITH_ONE_ARENA else min(count, _MOST_ARENAS)}
    return share | {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{name}={value}" for name, value in malloc.items())}


def spawn(
    environment: Mapping[str, str] | None,
    *,
    preload: bool = False,
    cores: Collection[int] | None = None,
    module: str = ENGINE_MODULE,
    descriptors: Sequence[int] = (),
) -> Spawned:
    """Start an engine process that waits for its EngineSpec, or a worker of another host; it inherits stdout and stderr.

    It runs in a separate session, so that a Ctrl-C in the terminal reaches only this process. It ends when its stdin is
    closed, or with the thread that called this function.

    environment: its variables, over those of `engine_environment`; None: those of this process, unchanged.
    cores: processor cores that its threads may use; None: those of this process.
    descriptors: further files that it inherits.
    """
    if environment is not None:
        environment = {**engine_environment(environment, None if cores is None else len(cores)), **environment}
    process = Spawned(
        [sys.executable, "-m", module, *([PRELOAD_FLAG] if preload else [])],
        stdin=subprocess.PIPE,
        pass_fds=descriptors,
        start_new_session=True,
        env=environment,
    )
    if cores is not None:  # it has one thread yet; later ones inherit the cores
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(process.pid, cores)
    return process


@contextlib.contextmanager
def spawned(environment: Mapping[str, str], cores: Collection[int] | None = None) -> Iterator[Spawned]:
    """Start an engine process for a real model and kill it after the block, if it still runs."""
    with spawn(environment, preload=True, cores=cores) as process:
        try:
            yield process
        finally:
            process.kill()
