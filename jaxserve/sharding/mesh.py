"""The device mesh of one engine, and the sharding of every array on it.

Parallelism is the table of `rules`, not a code path: XLA partitions the one step function by the shardings of its
arguments (GSPMD, arXiv 2105.04663).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.sharding.rules import Axes, AxisRules, MeshShape, axis_rules, common_kv_heads, common_vocab

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sharding:
    """A mesh, and the mesh axes of every logical axis."""

    mesh: Mesh
    rules: AxisRules

    def place(self, axes: Axes) -> NamedSharding:
        """Return the sharding of an array with these logical axes."""
        return NamedSharding(self.mesh, self.rules.spec(axes))

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        return tuple(self.mesh.devices.flat)

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


def make_sharding(
    config: DecoderConfig | EncoderConfig, shape: MeshShape, devices: Sequence[jax.Device] | None = None
) -> Sharding:
    """Split every axis that divides evenly; replicate the others and log a warning.

    devices: devices to choose from, of any process, which may be only descriptions to compile for; None: all devices of
    the program. Neighbours in the list share the fastest mesh axis, `tensor`. Raises ConfigError if they are too few, and
    if experts or a model without experts cannot be split as `shape` asks.
    """
    devices = jax.devices() if devices is None else devices
    if shape.num_devices > len(devices):
        flags = f"--tensor-parallel-size {shape.tensor}"
        if shape.data > 1:
            flags += f" with --data-parallel-size {shape.data}"
        raise ConfigError(f"{flags} needs {shape.num_devices} devices, found {len(devices)} ({devices[0].platform})")
    check_shape(config, shape)
    rules = axis_rules(config, shape)
    for axis, count, wanted in _split_counts(config, shape):
        if rules.count(axis) < min(wanted, 2):
            _LOG.warning("%s (%d) does not divide over %d devices: each holds all of it", axis, count, wanted)
    sizes = shape.sizes
    grid = np.array(devices[: shape.num_devices]).reshape(tuple(sizes.values()))
    return Sharding(Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)), rules)


def check_shape(config: DecoderConfig | EncoderConfig, shape: MeshShape) -> None:
    """Raise ConfigError if this model cannot be split as `shape` asks."""
    experts = config.experts if isinstance(config, DecoderConfig) else None
    if shape.expert > 1 and experts is None:
        raise ConfigError(f"--expert-parallel-size {shape.expert}: this model has no experts")
    if shape.expert > 1 and experts is not None and experts.scales_inputs:
        raise ConfigError(f"--expert-parallel-size {shape.expert}: not with experts whose inputs are scaled; use 1")
    if experts is not None and experts.num_experts % shape.expert:
        raise ConfigError(
            f"--expert-parallel-size {shape.expert} must divide the {experts.num_experts} experts of this model"
        )
    if shape.data > 1 and isinstance(config, EncoderConfig):
        raise ConfigError(f"--data-parallel-size {shape.data}: an encoder has no KV cache to divide; use 1")


def host_devices(num_devices: int, num_hosts: int) -> list[jax.Device]:
    """Return the devices of an engine on `num_hosts` hosts, those of one host side by side, equally many of each.

    Raises ConfigError if a host has too few.
    """
    if num_hosts == 1:
        return jax.devices()
    by_host: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        by_host.setdefault(device.process_index, []).append(device)
    wanted = num_devices // num_hosts
    for host, devices in sorted(by_host.items()):
        if len(devices) < wanted:
            raise ConfigError(
                f"an engine of {num_devices} devices needs {wanted} on each of {num_hosts} hosts, host {host} "
                f"has {len(devices)} ({devices[0].platform})"
            )
    return [device for _, devices in sorted(by_host.items()) for device in devices[:wanted]]


def _split_counts(config: DecoderConfig | EncoderConfig, shape: MeshShape) -> list[tuple[str, int, int]]:
    """Return the name and size of every axis that is split if it divides, and the devices to split it over."""
    counts = [
        ("vocab", common_vocab(config), shape.num_devices),
        ("ffn", config.intermediate_size, shape.num_devices),
        ("kv_heads", common_kv_heads(config), shape.tensor),
    ]
    if isinstance(config, DecoderConfig) and config.experts is not None:
        counts.append(("expert_ffn", config.experts.intermediate_size, shape.num_devices // shape.expert))
        if config.experts.shared_intermediate_size is not None:
            counts.append(("shared_ffn", config.experts.shared_intermediate_size, shape.num_devices))
    return counts
