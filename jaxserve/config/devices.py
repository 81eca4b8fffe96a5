"""Settings of devices, replicas and hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.config.option import option
from jaxserve.errors import ConfigError

Routing = Literal["prefix", "least-tokens", "round-robin"]
ExpertExchange = Literal["auto", "all-to-all", "all-reduce"]
Placement = Literal["manual", "ray"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Devices of one engine."""

    tensor_parallel_size: int = option(1, ge=1, help="devices that the heads of each layer are split over")
    data_parallel_size: int = option(
        1,
        ge=1,
        help="groups of --tensor-parallel-size devices, each with the KV cache of its own requests; all other weights are "
        "split over all devices",
    )
    expert_parallel_size: int = option(
        1,
        ge=1,
        help="groups that the experts are divided into, over all devices; 1: every device holds a part of each expert",
    )
    expert_exchange: ExpertExchange = option(
        "auto",
        help="how tokens reach experts on other devices; all-to-all: sent there and back; all-reduce: every device "
        "computes its experts for all tokens; auto: the one that moves fewer bytes, on CPUs all-reduce",
    )
    replicas: int = option(
        1,
        ge=1,
        le=512,
        help="engines with the same model on disjoint devices of this machine (on CPUs: disjoint cores); limits on "
        "requests, queues and memory are those of each",
    )
    routing: Routing = option(
        "prefix",
        help="how a replica is chosen; prefix: the least work, counting cached pages of the prompt; least-tokens: the "
        "fewest outstanding tokens; round-robin: each in its turn",
    )
    max_imbalance_tokens: int = option(
        16_384,
        ge=0,
        help="outstanding tokens beyond those of the least loaded replica up to which a cached prefix attracts requests",
    )

    def __post_init__(self) -> None:
        groups, num_devices = self.expert_parallel_size, self.num_devices
        if groups > 1 and (num_devices % groups or groups % self.data_parallel_size):
            raise ConfigError(
                f"--expert-parallel-size {groups} must divide the {num_devices} devices (--tensor-parallel-size times "
                f"--data-parallel-size) and be a multiple of --data-parallel-size {self.data_parallel_size}"
            )

    @property
    def num_devices(self) -> int:
        """Devices of one engine, over all hosts."""
        return self.tensor_parallel_size * self.data_parallel_size


@dataclass(frozen=True, kw_only=True, slots=True)
class HostsConfig:
    """Hosts of one engine: one process on each, all running the same programs."""

    num_hosts: int = option(1, ge=1, le=1024, help="hosts that share the engine's devices, equally many of each")
    host_rank: int | None = option(
        None, ge=0, help="number of this host, from 0; host 0 answers HTTP and schedules, the others only compute"
    )
    placement: Placement = option(
        "manual",
        help="manual: the same command on every host; ray: this host is host 0, and Ray starts the others, a node for each",
    )
    placement_group: str | None = option(
        None,
        help="hexadecimal id of a Ray placement group with a bundle for each host, this one's first (--placement ray); "
        "without it Ray reserves one",
    )
    coordinator: str | None = option(
        None, help="HOST:PORT on which host 0 listens for the others; all ports between the hosts must be open"
    )
    host_timeout: float = option(
        5.0,
        ge=0.5,
        help="seconds without a sign of life after which a host counts as lost, and the engine starts again",
    )
    host_join_timeout: float = option(300.0, ge=1, help="seconds that every start of the engine waits for all hosts")

    @property
    def rank(self) -> int:
        """Number of this host."""
        return self.host_rank or 0
