"""Plans several models of one server: the share of the devices that each has, and one verdict.

The division is the server's own (`runtime.models.model_devices`), over described devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from jaxserve.config import Config
from jaxserve.errors import ConfigError, DoesNotFitError
from jaxserve.runtime.models.model_configs import model_name
from jaxserve.runtime.models.model_devices import divide_chips, divide_gpus
from jaxserve.runtime.settings import BY_NAME, format_value
from jaxserve.tools.planning.devices import Device
from jaxserve.tools.planning.fit import gib
from jaxserve.tools.planning.machine import Machine
from jaxserve.tools.planning.plan import FORMAT_VERSION, Plan
from jaxserve.tools.planning.planner import device_rates, plan_model, quiet_engine
from jaxserve.types import GPU_SHARE

Sharing = Literal["own devices", "memory"]
_CACHES: Final = tuple(1 << power for power in range(31, 25, -1))
"""Sizes of a KV cache that are tried on a CPU, 2 GiB to 64 MiB."""
_MOVES: Final = ("--device ", "--tensor-parallel-size ", "--memory-fraction ")
_PERCENT: Final = 90
"""Part of a GPU's memory that models which share it may have together."""

PlanOne = Callable[[Config, Device, Sequence[str]], Plan]
"""Plans a model on a device; the notes are added to the plan's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """The plan of several models."""

    format_version: int = FORMAT_VERSION
    device: str
    """The devices in words."""
    sharing: Sharing
    fits: bool
    reason: str | None = None
    """The reason why the models do not fit together; None if they do."""
    advice: tuple[str, ...] = ()
    """Changes with which they fit together. Those of a single model are in its plan."""
    models: Mapping[str, Plan]
    """The plan of each model on its share, in the order in which the engines start."""


def make_server_plan(
    configs: Sequence[Config],
    machine: Machine,
    *,
    compiles: bool,
    all_programs: bool = False,
    has_speeds: bool = True,
) -> ServerPlan:
    """Return the plan of models that one server has together.

    compiles, all_programs: as for `make_plan`. has_speeds: False leaves bounds of speed out. Raises ConfigError for devices that the models cannot have, or another
    StartupError with one line.
    """
    if machine.num_hosts > 1:
        raise ConfigError(f"--hosts {machine.num_hosts}: several models are served on one host")
    rates = device_rates(machine.device) if has_speeds else None

    def plan_one(config: Config, device: Device, notes: Sequence[str], *, is_final: bool = True) -> Plan:
        options = {"compiles": compiles and is_final, "all_programs": all_programs and is_final}
        return plan_model(config, Machine(device), rates if is_final else None, notes=notes, **options)

    def estimate(config: Config, device: Device, notes: Sequence[str]) -> Plan:
        return plan_one(config, device, notes, is_final=False)

    with quiet_engine():
        plans = _plan_all(configs, machine, plan_one)
        misfits = [config for config, plan in zip(configs, plans, strict=True) if not plan.fits]
        is_shared = _shares_memory(configs, machine)
        counts = [plan.device.count for plan in plans]
        count = max(counts) if is_shared else sum(counts)
        title = machine.device.title
        return ServerPlan(
            device=title if count == 1 or machine.device.platform == "cpu" else f"{count} x {title}",
            sharing="memory" if is_shared else "own devices",
            fits=not misfits,
            reason=_reason(configs, plans, machine.device, estimate) if misfits else None,
            advice=tuple(_advice(configs, machine, estimate)) if misfits and is_shared else (),
            models={
                model_name(config): _without_moves(plan) if is_shared else plan
                for config, plan in zip(configs, plans, strict=True)
            },
        )


def _without_moves(plan: Plan) -> Plan:
    """Return the plan of a model that shares memory without the changes that mean another thing then: of its devices, and of
    the fraction of memory that a single model would have."""
    return replace(plan, advice=tuple(one for one in plan.advice if not one.change.startswith(_MOVES)))


def _shares_memory(configs: Sequence[Config], machine: Machine) -> bool:
    """Return True if the models share the memory of devices."""
    if machine.device.platform != "gpu":
        return machine.device.platform == "cpu"
    return sum(config.parallel.num_devices for config in configs) > _num_gpus(configs, machine)


def _num_gpus(configs: Sequence[Config], machine: Machine) -> int:
    """Return the GPUs of the machine; without a number, as many as the largest model takes."""
    return machine.num_devices or max(config.parallel.num_devices for config in configs)


def _plan_all(configs: Sequence[Config], machine: Machine, plan_one: PlanOne) -> list[Plan]:
    """Return the plan of each model on its share of the machine."""
    if machine.device.platform == "cpu":
        return list(_plan_one_after_another(configs, machine.device, plan_one))
    if machine.device.platform == "tpu":
        count = machine.num_devices or sum(config.parallel.num_devices for config in configs)
        shares = divide_chips(configs, _numbers(count))
    else:
        shares = divide_gpus(configs, _numbers(_num_gpus(configs, machine)))
    return [
        plan_one(share.config, _part_of(machine.device, share.memory_share), _notes_of(share.memory_share))
        for share in shares
    ]


def _plan_one_after_another(configs: Sequence[Config], device: Device, plan_one: PlanOne) -> Iterator[Plan]:
    """Yield the plan of each model in the memory that those before it leave, as engines start."""
    earlier: list[str] = []
    for config in configs:
        notes = [f"its memory is what is left by {', '.join(earlier)}"] if earlier else []
        plan = plan_one(config, device, notes)
        if plan.memory is not None:
            device = replace(device, memory_bytes=max(plan.memory.free_bytes, 0), runtime_share=1.0)
        earlier.append(model_name(config))
        yield plan


def _part_of(device: Device, share: float | None) -> Device:
    """Return a GPU with the part of its memory that one process takes."""
    return device if share is None else replace(device, runtime_share=device.runtime_share * share / GPU_SHARE)


def _notes_of(share: float | None) -> list[str]:
    return [] if share is None else [f"its process takes {share:.0%} of the GPU's memory, which the models share"]


def _numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def _reason(configs: Sequence[Config], plans: Sequence[Plan], device: Device, estimate: PlanOne) -> str:
    """Return one line about the models that do not fit their shares."""
    parts = []
    for config, plan in zip(configs, plans, strict=True):
        if not plan.fits:
            is_alone = _fits(config, device, estimate)
            name, limit = model_name(config), gib(plan.device.limit_bytes)
            parts.append(
                f"{name} would fit alone, but not in its share, {limit}"
                if is_alone
                else f"{name} does not fit alone either"
            )
    return "; ".join(parts)


def _fits(config: Config, device: Device, estimate: PlanOne) -> bool:
    with contextlib.suppress(DoesNotFitError):
        return estimate(config, device, ()).fits
    return False


def _advice(configs: Sequence[Config], machine: Machine, estimate: PlanOne) -> Iterator[str]:
    """Yield changes with which models that share memory fit, each checked with the arithmetic of their plans."""
    device = machine.device
    if device.platform == "cpu":
        for num_bytes in _CACHES:
            changed = [_with_cache(config, num_bytes) for config in configs]
            if all(plan.fits for plan in _plan_one_after_another(changed, device, estimate)):
                yield f"{BY_NAME['kv_cache_memory'].flag} {format_value(BY_NAME['kv_cache_memory'], num_bytes)} for all of them"
                return
        return
    needed = sum(config.parallel.num_devices for config in configs)
    if needed <= device.most_per_host and all(_fits(config, device, estimate) for config in configs):
        yield f"--device {device.name}x{needed}: devices of its own for each model"
    if (parts := _fractions(configs, device, estimate)) is not None:
        shown = ", ".join(f"{part / 100:g} for {model_name(one)}" for one, part in zip(configs, parts, strict=True))
        yield f"memory_fraction {shown}, each among the model's own settings"


def _with_cache(config: Config, num_bytes: int) -> Config:
    return replace(config, cache=replace(config.cache, kv_cache_memory=num_bytes))


def _fractions(configs: Sequence[Config], device: Device, estimate: PlanOne) -> list[int] | None:
    """Return the percent of a GPU's memory for each model with which all fit, what is left over for the one that needs most.

    None if there are none.
    """
    parts = []
    for config in configs:
        least = _least_percent(config, device, estimate)
        if least is None:
            return None
        parts.append(least)
    left = _PERCENT - sum(parts)
    if left < 0:
        return None
    parts[parts.index(max(parts))] += left
    return parts


def _least_percent(config: Config, device: Device, estimate: PlanOne) -> int | None:
    """Return the smallest percent of a GPU's memory with which a model fits, by halving; None if none does."""

    def fits(percent: int) -> bool:
        pair = [_with_percent(config, percent), _with_percent(config, _PERCENT - percent)]
        share = divide_gpus(pair, _numbers(config.parallel.num_devices))[0]
        return _fits(share.config, _part_of(device, share.memory_share), estimate)

    low, high = 0, _PERCENT - 1  # does not fit, may fit
    if not fits(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _with_percent(config: Config, percent: int) -> Config:
    return replace(config, cache=replace(config.cache, memory_fraction=percent / 100))
