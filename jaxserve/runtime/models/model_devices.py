"""Divides the devices of one machine, and their memory, among the models of a server. Without jax.

GPUs: a model has its own, in the order of the models, if there are enough for all; otherwise all models share the first
ones, and each process takes its part of their memory at its start. TPU chips belong to one process each. On CPUs the
models share cores and memory: each KV cache is sized by what is free when its model starts.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from jaxserve.config import CacheConfig, Config
from jaxserve.errors import ConfigError, DoesNotFitError
from jaxserve.runner.host.memory import available_bytes
from jaxserve.runtime.devices import (
    ALL_DEVICES,
    ReplicaDevices,
    divide_devices,
    list_devices,
    select_chips,
    select_gpus,
    visible_chips,
    visible_gpus,
)
from jaxserve.types import GPU_SHARE

_log = logging.getLogger(__name__)

_WHOLE: Final = CacheConfig().memory_fraction
"""The default of `--memory-fraction`: a model that has it takes an equal part of what the others leave."""
_OF_OWN: Final = _WHOLE / GPU_SHARE
"""Fraction of the memory that a process has taken which it fills with weights and KV cache; the same as of a single model."""


@dataclass(frozen=True, slots=True)
class ModelShare:
    """The part of the machine that one model has."""

    config: Config
    """Its settings, with the fraction of memory that remains for it."""
    devices: list[ReplicaDevices]
    """The devices of each replica."""
    memory_share: float | None = None
    """Fraction of each GPU's memory that its process takes at its start; None: the model has its devices for itself."""


def divide_among_models(
    configs: Sequence[Config],
    environ: Mapping[str, str],
    names: Callable[[], Iterable[str]] = list_devices,
    cores: Callable[[], Iterable[int]] = lambda: os.sched_getaffinity(0),
    free_bytes: Callable[[], int] = available_bytes,
) -> list[ModelShare]:
    """Return the share of each model. Raises ConfigError for too few devices, DoesNotFitError for too little memory.

    environ: environment of the engines. names: lists the machine's device files. cores: lists the usable cores.
    free_bytes: returns the memory that is free on this host.
    """
    if len(configs) == 1:
        devices = divide_devices(configs[0].parallel, environ, names, cores)
        if not any(own.variables for own in devices):
            _warn_of_memory(configs[0], free_bytes)
        return [ModelShare(configs[0], devices)]
    if environ.get("JAX_PLATFORMS", "").split(",")[0] != "cpu":
        found = list(names())
        if gpus := visible_gpus(environ, found):
            return divide_gpus(configs, gpus)
        if chips := visible_chips(found):
            return divide_chips(configs, chips)
    return [ModelShare(config, [ALL_DEVICES]) for config in configs]


def _warn_of_memory(config: Config, free_bytes: Callable[[], int]) -> None:
    """Log KV caches of replicas on a CPU that may be larger together than the free memory.

    Each engine sees the memory of the others as free until it is written. A cache may be smaller than asked for: no larger than
    full requests could use, which depends on the model.
    """
    own, replicas = config.cache.kv_cache_memory, config.parallel.replicas
    if own is not None and replicas > 1 and own * replicas > (free := free_bytes()):
        _log.warning(
            "--kv-cache-memory with --replicas %d: up to %.2f GiB for each are %.2f GiB, and %.2f GiB are free on this host: "
            "lower one of them unless the model's caches are smaller",
            replicas,
            own / 2**30,
            own * replicas / 2**30,
            free / 2**30,
        )


def divide_gpus(configs: Sequence[Config], gpus: list[str]) -> list[ModelShare]:
    """Return the share of each model: GPUs of its own if there are enough, else a part of the first ones' memory.

    Raises ConfigError for too few GPUs, DoesNotFitError for fractions that are too much together.
    """
    sizes = [config.parallel.num_devices for config in configs]
    if sum(sizes) <= len(gpus):
        own = _consecutive(sizes, gpus)
        return [ModelShare(config, [select_gpus(mine)]) for config, mine in zip(configs, own, strict=True)]
    for config, size in zip(configs, sizes, strict=True):
        if size > len(gpus):
            name = config.model.served_model_name
            raise ConfigError(f"{name}: --tensor-parallel-size {size}: this machine has {len(gpus)} GPUs")
    shares = [fraction / _OF_OWN for fraction in _fractions(configs)]
    return [
        ModelShare(_with_fraction(config, _OF_OWN), [select_gpus(gpus[:size], share)], share)
        for config, size, share in zip(configs, sizes, shares, strict=True)
    ]


def divide_chips(configs: Sequence[Config], chips: list[str]) -> list[ModelShare]:
    """Return the share of each model: chips of its own. Raises ConfigError for too few."""
    sizes = [config.parallel.num_devices for config in configs]
    if sum(sizes) > len(chips):
        raise ConfigError(
            f"{len(configs)} models need {sum(sizes)} TPU chips, this machine has {len(chips)}: "
            "a chip belongs to one model"
        )
    own = _consecutive(sizes, chips)
    return [ModelShare(config, [select_chips(mine)]) for config, mine in zip(configs, own, strict=True)]


def _fractions(configs: Sequence[Config]) -> list[float]:
    """Return the fraction of a GPU's memory that each model may use. Raises DoesNotFitError if they are too much together."""
    asked = {index: config.cache.memory_fraction for index, config in enumerate(configs)}
    given = {index: fraction for index, fraction in asked.items() if fraction != _WHOLE}
    num_others, left = len(asked) - len(given), _WHOLE - sum(given.values())
    if left < 0 or (num_others and left < 0.01 * num_others):
        shown = ", ".join(f"{configs[index].model.served_model_name} {given[index]:g}" for index in given)
        rest = f", and {num_others} more models have none" if num_others else ""
        raise DoesNotFitError(
            f"--memory-fraction: {shown}{rest}: models that share a GPU may have {_WHOLE:g} together; "
            "lower them in their files, or give none and the memory is divided evenly"
        )
    return [given.get(index, left / max(num_others, 1)) for index in asked]


def _with_fraction(config: Config, fraction: float) -> Config:
    return dataclasses.replace(config, cache=dataclasses.replace(config.cache, memory_fraction=fraction))


def _consecutive(sizes: Sequence[int], devices: Sequence[str]) -> list[list[str]]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [list(devices[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
