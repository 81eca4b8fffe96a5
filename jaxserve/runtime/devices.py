"""Divides the devices of one machine among replicas, without jax: variables and cores of each engine process.

Every replica sees only its own devices, so it counts them from 0. GPUs and TPU chips are divided in the order of their
numbers, `--tensor-parallel-size` for each replica. On CPUs the cores that this process may use are divided evenly.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from jaxserve.config import ParallelConfig
from jaxserve.errors import ConfigError

_log = logging.getLogger(__name__)

_TPU_BOUNDS: Final = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""Shape of the chips of one process, by their number."""


@dataclass(frozen=True, slots=True)
class ReplicaDevices:
    """The devices of one engine process."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that select its accelerators."""
    cores: frozenset[int] | None = None
    """Processor cores; None: all that this process may use."""


ALL_DEVICES: Final = ReplicaDevices()


def list_devices() -> list[str]:
    """Return the names in /dev, and those in /dev/vfio as `vfio/NAME`."""
    return [
        *(path.name for path in Path("/dev").glob("*")),
        *(f"vfio/{path.name}" for path in Path("/dev/vfio").glob("*")),
    ]


def divide_devices(
    parallel: ParallelConfig,
    environ: Mapping[str, str],
    names: Callable[[], Iterable[str]] = list_devices,
    cores: Callable[[], Iterable[int]] = lambda: os.sched_getaffinity(0),
) -> list[ReplicaDevices]:
    """Return the devices of each replica; of a single one, all. Raises ConfigError if there are too few.

    environ: environment of the engines. names: lists the machine's device files. cores: lists the usable cores.
    """
    if parallel.replicas == 1:
        return [ALL_DEVICES]
    platforms = environ.get("JAX_PLATFORMS", "").split(",")
    if platforms[0] != "cpu":
        found = list(names())
        if gpus := visible_gpus(environ, found):
            return [select_gpus(own) for own in _shares(parallel, gpus, "GPUs")]
        if chips := visible_chips(found):
            _check_shape(parallel.num_devices)
            return [select_chips(own) for own in _shares(parallel, chips, "TPU chips")]
    return _divide_cores(parallel.replicas, sorted(cores()))


def select_gpus(gpus: Sequence[str], memory_share: float | None = None) -> ReplicaDevices:
    """Return the variables with which a process sees these GPUs only.

    memory_share: fraction of their memory that it takes at its start; None: as the environment says.
    """
    share = {} if memory_share is None else {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{memory_share:.4f}"}
    return ReplicaDevices({"CUDA_VISIBLE_DEVICES": ",".join(gpus), **share})


def select_chips(chips: Sequence[str]) -> ReplicaDevices:
    """Return the variables with which a process sees these TPU chips only. Raises ConfigError for a number without a shape."""
    _check_shape(len(chips))
    return ReplicaDevices(
        {
            "TPU_VISIBLE_CHIPS": ",".join(chips),
            "TPU_CHIPS_PER_HOST_BOUNDS": _TPU_BOUNDS[len(chips)],
            "TPU_HOST_BOUNDS": "1,1,1",
        }
    )


def _check_shape(num_chips: int) -> None:
    if num_chips not in _TPU_BOUNDS:
        raise ConfigError(
            f"--tensor-parallel-size {num_chips}: engines that share a TPU host have 1, 2, 4 or 8 chips each"
        )


def _divide_cores(num_replicas: int, cores: list[int]) -> list[ReplicaDevices]:
    num_own = len(cores) // num_replicas
    if not num_own:
        _log.warning("%d replicas share %d cores: each would need one of its own", num_replicas, len(cores))
        return [ALL_DEVICES] * num_replicas
    return [ReplicaDevices(cores=frozenset(cores[i * num_own : (i + 1) * num_own])) for i in range(num_replicas)]


def _shares(parallel: ParallelConfig, devices: list[str], noun: str) -> list[list[str]]:
    size, num_needed = parallel.num_devices, parallel.replicas * parallel.num_devices
    if num_needed > len(devices):
        raise ConfigError(
            f"--replicas {parallel.replicas} with --tensor-parallel-size {size} needs {num_needed} {noun}, "
            f"this machine has {len(devices)}"
        )
    return [devices[start : start + size] for start in range(0, num_needed, size)]


def visible_gpus(environ: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Return the GPUs that engines with this environment see. names: of device files."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    return _numbers(r"nvidia(\d+)", names)


def visible_chips(names: Iterable[str]) -> list[str]:
    """Return the TPU chips of this machine. names: of device files."""
    return _numbers(r"(?:accel|vfio/)(\d+)", names)


def _numbers(pattern: str, names: Iterable[str]) -> list[str]:
    matches = (re.fullmatch(pattern, name) for name in names)
    return sorted((match[1] for match in matches if match), key=int)
