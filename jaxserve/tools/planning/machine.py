"""The devices of one engine to plan for: so many of a kind, on one host or several."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from jaxserve.config import Config, ParallelConfig
from jaxserve.errors import ConfigError, DoesNotFitError
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.tools.planning.devices import NAMES, Device, find_device
from jaxserve.tools.planning.fit import make_fit, planned_draft

_FORM = re.compile(rf"(?P<name>{'|'.join(NAMES)})(?:x(?P<per_host>[1-9]\d?)|-(?P<slice>[1-9]\d{{0,3}}))?")
_CHIPS_OF_SLICE_HOST: Final = 4
"""Chips of each host of a TPU slice over several hosts; hosts with eight are slices of their own."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices of one kind."""

    device: Device
    num_devices: int | None = None
    """None: as many as the settings take."""
    num_hosts: int = 1

    def of_one_replica(self, parallel: ParallelConfig) -> Machine:
        """Return the devices of one engine of the settings' replicas, or its part of the memory of a CPU. Raises ConfigError."""
        count, num_devices = parallel.replicas, self.num_devices
        if count == 1:
            return self
        if self.num_hosts > 1:
            raise ConfigError(f"--hosts {self.num_hosts}: replicas (--replicas {count}) are engines of one machine")
        if self.device.platform == "cpu":
            return replace(
                self, device=replace(self.device, memory_bytes=self.device.limit_bytes // count, runtime_share=1.0)
            )
        if num_devices is None:
            return self
        if num_devices < count * parallel.num_devices:
            raise ConfigError(
                f"--replicas {count}: engines of {parallel.num_devices} devices need {count * parallel.num_devices}, "
                f"--device {self.device.name} has {num_devices}"
            )
        return replace(self, num_devices=num_devices // count)


def find_machine(name: str, num_hosts: int = 1, memory_bytes: int | None = None) -> Machine:
    """Read NAME, NAMExN (N devices of each host) or NAME-N (a TPU slice of N devices). Raises ConfigError.

    memory_bytes: usable memory of one device; None: the device's.
    """
    match = _FORM.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"--device {name}: one of {', '.join(NAMES)}, NAMExN for N devices a host, NAME-N for a TPU slice"
        )
    device = find_device(match["name"], memory_bytes)
    if match["slice"] is not None:
        count = int(match["slice"])
        if device.platform != "tpu":
            raise ConfigError(f"--device {name}: slices are of TPUs; for N devices a host give {device.name}xN")
        hosts = 1 if count <= device.most_per_host else -(-count // _CHIPS_OF_SLICE_HOST)
        if num_hosts not in (1, hosts):
            raise ConfigError(f"--hosts {num_hosts}: a slice of {count} {device.title} has {hosts}")
        return Machine(device, count, hosts)
    if match["per_host"] is None:
        if num_hosts > 1:
            raise ConfigError(f"--hosts {num_hosts}: give the devices of a host, as --device {device.name}xN")
        return Machine(device)
    per_host = int(match["per_host"])
    if per_host > device.most_per_host:
        raise ConfigError(f"--device {name}: a host has at most {device.most_per_host} {device.title}")
    return Machine(device, per_host * num_hosts, num_hosts)


def with_sizes(config: Config, decoder: DecoderConfig, machine: Machine) -> Config:
    """Return the config for all devices of a machine, with the parallel sizes of the settings if there are any.

    With a draft model or an MTP layer, all devices share each layer, or one has the model if they cannot. Otherwise, with those whose KV cache holds most tokens, more than all requests can have counting no more; of these, with
    most devices per layer. If no sizes fit, with most devices per layer. Raises ConfigError for settings that need more devices than there are.
    """
    count, parallel = machine.num_devices, config.parallel
    if count is None:
        return config
    if parallel.num_devices > count:
        raise ConfigError(f"the parallel sizes need {parallel.num_devices} devices, {machine.device.name} has {count}")
    if parallel.num_devices > 1 or count == 1:
        return config
    if config.scheduler.has_drafter:
        return _with_drafter(config, decoder, machine)
    best, most_tokens = None, -1
    for sizes in _candidates(parallel, decoder, count):
        candidate = replace(config, parallel=sizes)
        try:
            limits = make_fit(candidate, decoder, machine.device).limits
            most = limits.buckets.max_num_seqs * limits.max_model_len
            num_tokens = min(limits.num_usable_blocks * limits.spec.block_size, most)
        except DoesNotFitError:
            num_tokens = 0
        if num_tokens > most_tokens:
            best, most_tokens = candidate, num_tokens
    if best is None:
        raise ConfigError(f"{decoder.num_heads} query heads divide over none of the divisors of {count} devices")
    return best


def _with_drafter(config: Config, decoder: DecoderConfig, machine: Machine) -> Config:
    """Return the config for all devices, which share each layer of the model and of its drafter, or for one."""
    assert machine.num_devices is not None, "devices of a machine"
    for sizes in _candidates(config.parallel, decoder, machine.num_devices):
        if sizes.data_parallel_size == 1:
            candidate = replace(config, parallel=sizes)
            with contextlib.suppress(ConfigError):
                planned_draft(candidate, decoder.for_devices(sizes.tensor_parallel_size), machine.device)
                return candidate
    return config


def _candidates(parallel: ParallelConfig, decoder: DecoderConfig, count: int) -> Iterator[ParallelConfig]:
    """Yield sizes that split all heads evenly, the most devices per layer first."""
    for tensor in sorted((n for n in range(1, count + 1) if count % n == 0), reverse=True):
        num_kv_heads = decoder.for_devices(tensor).common_kv_heads
        if num_kv_heads % tensor:
            continue
        data, groups = count // tensor, 1
        if decoder.experts is not None:
            every = (n for n in range(data, count + 1, data) if count % n == 0)
            groups = max((n for n in every if decoder.experts.num_experts % n == 0), default=1)
        yield replace(parallel, tensor_parallel_size=tensor, data_parallel_size=data, expert_parallel_size=groups)
