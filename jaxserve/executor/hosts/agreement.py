"""Values that the hosts of one engine must agree on before it serves.

Every host gets the values of all hosts, so each computes the same verdict and refuses with the same line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from importlib.metadata import version
from typing import Any, Final, Protocol

from jaxserve import __version__
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.config import Config, HostsConfig, ParallelConfig
from jaxserve.errors import ConfigError
from jaxserve.executor.hosts.messages import PROTOCOL
from jaxserve.runner.program_cache import differences

_OWN_SETTINGS: Final = frozenset(
    {"model", "revision", "served_model_name", "seed", "chat_template", "generation_config", "compile_cache"}
)
"""Settings of the compared sections that may differ between hosts."""


class Hosts(Protocol):
    """The hosts of one engine, as one of them sees them."""

    @property
    def rank(self) -> int: ...

    def connect(self) -> None:
        """Join the hosts' program, before this process uses a device."""
        ...

    def exchange(self, topic: str, values: dict[str, str]) -> Sequence[Mapping[str, str]]:
        """Return the values of all hosts by rank. Blocks until every host has called it with this topic, once.

        Raises StartupError if a host cannot start.
        """
        ...


class OneHost:
    """The hosts of an engine on this host alone."""

    rank = 0

    def connect(self) -> None:
        """There is no other host to join."""

    def exchange(self, topic: str, values: dict[str, str]) -> Sequence[Mapping[str, str]]:
        """Return these values."""
        return (values,)


ONE_HOST: Final = OneHost()


def on_one_host(config: Config) -> Config:
    """Return the config of an engine on one host's share of the devices."""
    num_devices = config.parallel.num_devices // config.hosts.num_hosts
    if config.hosts.num_hosts == 1:
        return config
    return replace(config, hosts=HostsConfig(), parallel=ParallelConfig(tensor_parallel_size=num_devices))


def shared_settings(config: Config) -> dict[str, str]:
    """Return versions and settings that must be equal on all hosts, by name."""
    versions = {"protocol": str(PROTOCOL), "jaxserve": __version__, "jax": version("jax"), "jaxlib": version("jaxlib")}
    sections: tuple[Any, ...] = (config.model, config.cache, config.scheduler, config.parallel, config.compile)
    settings = {
        f"--{field.name.replace('_', '-')}": str(getattr(section, field.name))
        for section in sections
        for field in fields(section)
        if field.name not in _OWN_SETTINGS
    }
    # A worker with a longer --host-timeout would be silent for too long, one with a shorter --shutdown-timeout end before host 0.
    hosts = {"--num-hosts": str(config.hosts.num_hosts), "--host-timeout": str(config.hosts.host_timeout)}
    return versions | settings | hosts | {"--shutdown-timeout": str(config.server.shutdown_timeout)}


def checkpoint_hash(checkpoint: Checkpoint) -> str:
    """Return 16 hex digits over the names, types and sizes of all tensors."""
    tensors = sorted((info.name, info.stored_dtype, info.shape) for info in checkpoint.tensors.values())
    return hashlib.sha256(repr(tensors).encode()).hexdigest()[:16]


def difference(host: str, there: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """Return one line on how the settings of `host` differ from those of host 0; None if they do not."""
    found = differences(there, here)
    return f"{host} differs from host 0: " + "; ".join(found) if found else None


def agree_equal(hosts: Hosts, topic: str, values: dict[str, str]) -> None:
    """Raise ConfigError, on every host, unless all hosts have the same values."""
    first, *others = hosts.exchange(topic, values)
    for rank, own in enumerate(others, start=1):
        line = difference(f"host {rank}", own, first)
        if line is not None:
            raise ConfigError(line)


def agree_smallest(hosts: Hosts, topic: str, value: int) -> int:
    """Return the smallest value of all hosts."""
    return min(int(values[topic]) for values in hosts.exchange(topic, {topic: str(value)}))


def agree_common(hosts: Hosts, topic: str, names: Collection[str]) -> frozenset[str]:
    """Return the names that every host has."""
    return frozenset.intersection(*(frozenset(values) for values in hosts.exchange(topic, dict.fromkeys(names, ""))))


def agree_kernels(hosts: Hosts, config: Config) -> Config:
    """Return `config` with the kernels that work on all hosts: attention is left to XLA if those of one host fail."""
    found = [
        values["attention"] for values in hosts.exchange("kernels", {"attention": config.compile.attention_backend})
    ]
    if "reference" not in found:
        return config
    return replace(config, compile=replace(config.compile, attention_backend="reference"))
