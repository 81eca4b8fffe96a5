"""Checks of addresses and URLs in settings, and of the settings of `HostsConfig`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.config import HostsConfig, ParallelConfig

_ORIGIN: Final = re.compile(r"https?://[A-Za-z0-9.\-\[\]:_]+")


def check_host(host: str) -> None:
    """Raise ConfigError for a `--host` that is written as in a URL."""
    if host.startswith("["):
        raise ConfigError(f"--host {host}: write the address without brackets, as in --host ::1")


def check_origin(origin: str) -> None:
    """Raise ConfigError for an entry of `--cors-allowed-origins` that is neither empty nor an origin nor `*`."""
    if origin not in ("", "*") and not (_ORIGIN.fullmatch(origin) and _has_host(origin)):
        raise ConfigError(
            f"--cors-allowed-origins {origin!r}: expected `*` or origins such as https://chat.example.org"
        )


def check_collector(url: str) -> None:
    """Raise ConfigError unless `--otlp-traces-endpoint` is a URL."""
    if not url.startswith(("http://", "https://")) or not _has_host(url):
        raise ConfigError(f"--otlp-traces-endpoint {url!r}: expected a URL like http://127.0.0.1:4318/v1/traces")


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0  # raises ValueError for a port that is no number of 16 bits
    except ValueError:
        return False


def host_and_port(flag: str, address: str) -> tuple[str, int]:
    """Return host and port of an address that `flag` gives. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 1 << 16):
        raise ConfigError(f"{flag} {address!r}: expected HOST:PORT, such as 10.0.0.1:7600")
    return host, int(port)


def coordinator_address(hosts: HostsConfig) -> tuple[str, int]:
    """Return host and port of `--coordinator`. Raises ConfigError."""
    return host_and_port("--coordinator", hosts.coordinator or "")


def check_hosts(hosts: HostsConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError unless the settings describe one host among `num_hosts` that divide the engine's devices."""
    num_devices = parallel.num_devices
    _check_placement_group(hosts)
    if hosts.num_hosts == 1:
        if hosts.host_rank or hosts.coordinator is not None:
            flag = f"--host-rank {hosts.host_rank}" if hosts.host_rank else f"--coordinator {hosts.coordinator}"
            raise ConfigError(f"{flag}: needs --num-hosts of 2 or more")
        if hosts.placement != "manual":
            raise ConfigError(f"--placement {hosts.placement}: needs --num-hosts of 2 or more")
        return
    _check_place(hosts)
    if parallel.replicas > 1:
        raise ConfigError(
            f"--replicas {parallel.replicas}: engines over several hosts (--num-hosts) are started one by one"
        )
    if num_devices % hosts.num_hosts:
        raise ConfigError(
            f"--num-hosts {hosts.num_hosts}: hosts have equally many devices, and {num_devices} (--tensor-parallel-size) do "
            "not divide by it"
        )


def _check_place(hosts: HostsConfig) -> None:
    if hosts.placement == "ray" and hosts.host_rank is None and hosts.coordinator is None:
        return  # Ray decides both
    if hosts.host_rank is None or hosts.coordinator is None:
        missing = "--host-rank" if hosts.host_rank is None else "--coordinator"
        raise ConfigError(f"--num-hosts {hosts.num_hosts}: needs {missing} as well")
    if hosts.host_rank >= hosts.num_hosts:
        raise ConfigError(
            f"--host-rank {hosts.host_rank}: at most {hosts.num_hosts - 1} with --num-hosts {hosts.num_hosts}"
        )
    coordinator_address(hosts)


def _check_placement_group(hosts: HostsConfig) -> None:
    if hosts.placement_group is None:
        return
    if hosts.placement != "ray":
        raise ConfigError("--placement-group: needs --placement ray")
    try:
        bytes.fromhex(hosts.placement_group)
    except ValueError:
        raise ConfigError(
            f"--placement-group {hosts.placement_group!r}: expected the hexadecimal id of a Ray placement group"
        ) from None
