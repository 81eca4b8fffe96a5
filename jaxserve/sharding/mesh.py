"""The device mesh of one engine, and the sharding of every array on it.

Tensor parallelism is this table, not a code path: XLA partitions the one step function by the
shardings of its arguments (GSPMD, arXiv 2105.04663).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.encoder import EncoderConfig

MODEL_AXIS = "model"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sharding:
    """A mesh, and the mesh axis of every logical axis (None: replicated)."""

    mesh: Mesh
    rules: Mapping[str, str | None]

    def place(self, axes: tuple[str | None, ...]) -> NamedSharding:
        """Return the sharding of an array with these logical axes."""
        spec = [None if axis is None else self.rules[axis] for axis in axes]
        used = [name for name in spec if name is not None]
        if len(used) != len(set(used)):
            raise ValueError(f"logical axes {axes} would split two dimensions over the same mesh axis: {spec}")
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        return tuple(self.mesh.devices.flat)

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def kv_pool(self) -> NamedSharding:
        """Sharding of a KV pool `[L, P, K, S, H]`."""
        return NamedSharding(self.mesh, PartitionSpec(None, None, self.rules["kv_heads"]))


def make_sharding(
    config: DecoderConfig | EncoderConfig, tensor_parallel_size: int, devices: Sequence[jax.Device] | None = None
) -> Sharding:
    """Split every axis that divides evenly; replicate the others and log a warning.

    devices: devices to choose from, which may be only descriptions to compile for; None: those of this process.
    Raises ConfigError if there are fewer than `tensor_parallel_size`.
    """
    devices = jax.devices() if devices is None else devices
    if tensor_parallel_size > len(devices):
        raise ConfigError(
            f"--tensor-parallel-size {tensor_parallel_size} needs as many devices, "
            f"found {len(devices)} ({devices[0].platform})"
        )
    for axis, count in _split_counts(config).items():
        if count % tensor_parallel_size:
            _LOG.warning(
                "%s (%d) does not divide over %d devices: each holds all of it", axis, count, tensor_parallel_size
            )
    mesh = Mesh(np.array(devices[:tensor_parallel_size]), (MODEL_AXIS,), axis_types=(AxisType.Auto,))
    return Sharding(mesh, axis_rules(config, tensor_parallel_size))


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
                f"--tensor-parallel-size {num_devices} needs {wanted} devices on each of {num_hosts} hosts, host {host} "
                f"has {len(devices)} ({devices[0].platform})"
            )
    return [device for _, devices in sorted(by_host.items()) for device in devices[:wanted]]


def axis_rules(config: DecoderConfig | EncoderConfig, size: int) -> dict[str, str | None]:
    """Return the mesh axis of every logical axis for a tensor-parallel size (None: replicated)."""
    split = split_axes(config, size)
    return {axis: MODEL_AXIS if axis in split else None for axis in ("embed", "heads", *_split_counts(config))}


def split_axes(config: DecoderConfig | EncoderConfig, size: int) -> tuple[str, ...]:
    """Return the logical axes that divide evenly over `size` devices; the others are replicated."""
    split = [axis for axis, count in _split_counts(config).items() if size > 1 and count % size == 0]
    return (*split, "heads") if "kv_heads" in split else tuple(split)


def _split_counts(config: DecoderConfig | EncoderConfig) -> dict[str, int]:
    """Return the size of every axis that can be split. Query heads follow their kv heads: attention needs no exchange."""
    counts = {"vocab": config.vocab_size, "ffn": config.intermediate_size, "kv_heads": config.num_kv_heads}
    if isinstance(config, DecoderConfig) and config.experts is not None:
        counts["expert_ffn"] = config.experts.intermediate_size
        if config.experts.shared_intermediate_size is not None:
            counts["shared_ffn"] = config.experts.shared_intermediate_size
    return counts
