"""Spawns the engine's process. Imports nothing but the standard library, so that it can be the first thing a server does.

The process begins with its own imports while its parent is still at its own; then it waits for its EngineSpec.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

from jaxserve.types import GPU_SHARE, PRELOAD_FLAG

_MALLOC: Final = {"hugetlb": 1, "mmap_threshold": 256 << 20, "trim_threshold": 256 << 20, "arena_max": 1}
ENVIRONMENT: Final = {
    "GLIBC_TUNABLES": ":".join(f"glibc.malloc.{name}={value}" for name, value in _MALLOC.items()),
    "XLA_PYTHON_CLIENT_MEM_FRACTION": str(GPU_SHARE),
}
"""Unless it says otherwise itself. JAX alone would leave a quarter of a GPU to others. On CPUs: weights and KV pool in
large pages where the kernel gives them on request: with pages of 4 KiB a CPU spends a third of a one-row step on
finding addresses. And a step's scratch memory stays ours between steps: else the kernel hands out the same 40 MB anew,
and clears them, at every step of 32 rows."""

Spawned: TypeAlias = "subprocess.Popen[bytes]"


def spawn(environment: Mapping[str, str] | None, *, preload: bool = False) -> Spawned:
    """An engine process that waits for its EngineSpec; its stdout and stderr are ours.

    It gets a session of its own, so that a Ctrl-C in the terminal reaches us alone and we decide. It ends when its
    stdin does, or with the thread that called this.

    environment: put over ENVIRONMENT; None: ours as it is.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "jaxserve.engine.process", *([PRELOAD_FLAG] if preload else [])],
        stdin=subprocess.PIPE,
        start_new_session=True,
        env=None if environment is None else {**ENVIRONMENT, **environment},
    )


@contextlib.contextmanager
def spawned(environment: Mapping[str, str]) -> Iterator[Spawned]:
    """An engine process for a real model, which is gone at the end of the block, whatever became of it."""
    with spawn(environment, preload=True) as process:
        try:
            yield process
        finally:
            process.kill()
