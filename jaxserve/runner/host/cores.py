"""The number of threads that compute on this host's processor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from jaxserve.runner.host.cgroup import ROOT, cpu_quota

_VARIABLE: Final = "NPROC"
"""XLA:CPU reads the size of its thread pools from here when it makes its client, else from the processors allowed."""


def num_cores(root: Path = ROOT) -> int:
    """Return the processors that this process can use at the same time, at least 1.

    These are the processors it is allowed on (taskset, cpuset), and no more whole ones than its quota of processor time
    pays for. A quota is rounded down: a thread beyond it makes every other one wait at the end of each loop while the
    system holds the process back, up to a tenth of a second at a time. root: the folder that stands for `/`.
    """
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def num_threads() -> int:
    """Return the threads of XLA:CPU in this process: `num_cores`, unless the user's environment has another number."""
    given = os.environ.get(_VARIABLE, "")
    return int(given) if given.isdigit() and int(given) else num_cores()


def limit_threads() -> None:
    """Keep XLA:CPU from using more threads than `num_threads`. Call it before jax makes its first client."""
    if num_threads() < len(os.sched_getaffinity(0)):
        os.environ[_VARIABLE] = str(num_threads())
