"""Arguments of `serve run jaxserve.ray:app`: those of the application, and settings of the servers that it starts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.routing.router import POLICY_NAMES, PolicyName
from jaxserve.runtime.environment import api_key_environment, load_config
from jaxserve.runtime.settings import BY_NAME, closest

_FIXED: Final = {"host": "127.0.0.1", "port": 0, "publish_pages": True, "behind_proxy": True}
"""Settings of a replica's server that the application decides."""
_OURS: Final = (
    "host_rank",
    "coordinator",
    "placement",
    "placement_group",
    "api_processes",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_ca_certs",
    "shutdown_timeout",
    "upgrade_timeout",
    "response_id_suffix",
)
"""Settings that replicas on Ray do not have: Ray places the hosts of a replica, a replica has one API process, Ray Serve's proxies
answer on the port, `drain_timeout_s` bounds the end of a replica, and ids of responses end with that of their replica."""

_MAX_PORTS: Final = 256
"""Ports from that of `kv_listen` on among which replicas on a node choose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RaySettings:
    """Settings of the application on Ray Serve."""

    replicas: int = field(default=1, metadata={"help": "replicas without autoscaling, and at the start with it"})
    max_replicas: int | None = field(
        default=None, metadata={"help": "most replicas; above `min_replicas` the number follows the load"}
    )
    min_replicas: int | None = field(default=None, metadata={"help": "fewest replicas (default: `replicas`)"})
    target_queued_tokens: int = field(
        default=8192, metadata={"help": "prompt tokens that may wait on each replica before another one is started"}
    )
    ingress_replicas: int = field(default=1, metadata={"help": "processes that receive requests and choose replicas"})
    routing: PolicyName = field(default="prefix", metadata={"help": "routing policy, as for --routing"})
    max_imbalance_tokens: int = field(default=16_384, metadata={"help": "as for --max-imbalance-tokens"})
    num_cpus: float = field(default=1.0, metadata={"help": "Ray CPUs that a replica reserves, on each of its hosts"})
    num_gpus: float = field(
        default=0.0, metadata={"help": "GPUs of a replica, on each of its hosts; Ray shows it only those"}
    )
    resources: Mapping[str, float] = field(
        default_factory=dict,
        metadata={"help": "further Ray resources of a replica, on each of its hosts, e.g. {TPU: 4}"},
    )
    tpu_slice: str = field(
        default="",
        metadata={"help": "type of the TPU slice that each replica gets whole, e.g. v5e-16 (with `num_hosts`)"},
    )
    routing_stats_period_s: float = field(
        default=1.0, metadata={"help": "seconds between a replica's reports of its load and cached pages"}
    )
    start_timeout_s: float = field(default=1800.0, metadata={"help": "seconds that a replica's start may take"})
    drain_timeout_s: float = field(
        default=600.0, metadata={"help": "seconds that running requests may take when a replica is stopped"}
    )


@dataclass(frozen=True, slots=True)
class AppSettings:
    """All arguments of the application."""

    ray: RaySettings
    server: Mapping[str, Any]
    """Settings of each replica's server, by name."""
    config: Config
    """The config that these settings make."""

    def for_replica(self, replica_id: str, environ: Mapping[str, str], claims: contextlib.ExitStack) -> dict[str, Any]:
        """Return the settings of one replica's server: the ids of its responses name it, its operator's socket and the port of its
        KV pages are its own. Several replicas may share a node.

        environ: the variables of the replica's node, which may give the socket and the port, too. claims: holds the claim of the port,
        until it is closed.
        """
        own = {**self.server, "response_id_suffix": replica_id}
        if path := self.server.get("admin_socket") or environ.get(BY_NAME["admin_socket"].variable):
            own["admin_socket"] = f"{path}.{replica_id}"
        if address := self.server.get("kv_listen") or environ.get(BY_NAME["kv_listen"].variable):
            own["kv_listen"] = _claimed_address(address, claims)
        return own

    @property
    def actor_options(self) -> dict[str, Any]:
        """Options of a replica's actor. On a TPU slice it holds the resource that only the slice's first host has."""
        own = self.ray
        resources = dict(own.resources)
        if own.tpu_slice:
            resources[f"TPU-{own.tpu_slice.replace('v5e-', 'v5litepod-')}-head"] = 1.0
        return {"num_cpus": own.num_cpus, "num_gpus": own.num_gpus, "resources": resources}

    @property
    def host_reservation(self) -> dict[str, Any]:
        """Options of a deployment whose replicas span hosts: one bundle each, on different nodes, the replica on the first.

        A replica on a TPU slice has none: it reserves the hosts of that slice on whose first host Ray has placed it.
        """
        if self.config.hosts.num_hosts == 1 or self.ray.tpu_slice:
            return {}
        bundle = {"CPU": self.ray.num_cpus, "GPU": self.ray.num_gpus, **self.ray.resources}
        each = {name: count for name, count in bundle.items() if count}
        return {
            "placement_group_bundles": [each] * self.config.hosts.num_hosts,
            "placement_group_strategy": "STRICT_SPREAD",
        }


def read_arguments(arguments: Mapping[str, Any]) -> AppSettings:
    """Return the settings in `arguments`, whose values may be text. Raises ConfigError.

    The config also has API keys that variables of this node give, unless `arguments` have the same setting. `server` never
    has those: it is written to a file.
    """
    own = {item.name: item for item in fields(RaySettings)}
    server = {name: value for name, value in arguments.items() if name not in own}
    for name in server:
        if name in _FIXED or name in _OURS:
            raise ConfigError(f"{name}: replicas on Ray Serve do not have this setting")
        if name not in BY_NAME:
            raise ConfigError(f"unknown argument `{name}`{closest(name, [*own, *BY_NAME])}")
    values = {name: _parsed(name, own[name], value) for name, value in arguments.items() if name in own}
    ray = RaySettings(**values)
    _check(ray)
    server |= _FIXED | {"shutdown_timeout": ray.drain_timeout_s}
    if str(server.get("num_hosts", 1)) != "1":
        server["placement"] = "ray"
    settings = AppSettings(ray, server, load_config(flags=server, environ=api_key_environment()))
    _check_slice(settings)
    return settings


def _claimed_address(address: str, claims: contextlib.ExitStack) -> str:
    """Return `address`, or the next one on which no process of this node listens or is about to; the server refuses what is no address.

    A server binds its port only after it has loaded and compiled its model. Until then a lock in the folder for temporary files
    stands for the address, which `claims` holds.
    """
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        for number in range(int(port), min(int(port) + _MAX_PORTS, 1 << 16)):
            with contextlib.suppress(OSError), contextlib.ExitStack() as claim:
                claim.callback(os.close, lock := _open_lock(host, number))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                socket.create_server((host.strip("[]"), number), family=_family(host)).close()
                claims.callback(claim.pop_all().close)
                return f"{host}:{number}"
    return address


def _open_lock(host: str, port: int) -> int:
    """Return the descriptor of an address's lock file, which is never removed. Raises OSError.

    A file of another user can be locked, too: it is opened to read only, and without O_CREAT, with which Linux refuses files of
    others in /tmp. What is no file neither leads elsewhere nor blocks.
    """
    path = Path(tempfile.gettempdir(), f"jaxserve-kv-{re.sub('[^0-9A-Za-z.-]', '_', host)}-{port}.lock")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        return os.open(path, flags | os.O_CREAT, 0o644)


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _parsed(name: str, item: Any, value: Any) -> Any:
    default = {"min_replicas": 1, "max_replicas": 1}.get(name, item.default)
    try:
        if default is MISSING:
            return {str(key): float(number) for key, number in dict(value).items()}
        return type(default)(value)
    except (TypeError, ValueError):
        kind = (
            "a mapping" if default is MISSING else {int: "an integer", float: "a number"}.get(type(default), "a text")
        )
        raise ConfigError(f"{name} {value!r}: expected {kind}") from None


def _check(ray: RaySettings) -> None:
    for name in ("replicas", "min_replicas", "max_replicas", "ingress_replicas", "target_queued_tokens"):
        value = getattr(ray, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value}: expected at least 1")
    if ray.routing not in POLICY_NAMES:
        raise ConfigError(f"routing {ray.routing!r}: expected one of {', '.join(POLICY_NAMES)}")
    least = ray.min_replicas or ray.replicas
    if ray.max_replicas is None:
        for name in ("min_replicas", "target_queued_tokens"):
            if getattr(ray, name) != getattr(RaySettings(), name):
                raise ConfigError(
                    f"{name} {getattr(ray, name)}: needs max_replicas, without which replicas are not added or removed"
                )
    elif ray.max_replicas < max(least, ray.replicas):
        name = "min_replicas" if ray.max_replicas < least else "replicas"
        raise ConfigError(f"max_replicas {ray.max_replicas}: expected at least {name}, {max(least, ray.replicas)}")
    if ray.drain_timeout_s < 0:
        raise ConfigError(f"drain_timeout_s {ray.drain_timeout_s:g}: expected at least 0")
    if ray.routing_stats_period_s <= 0:
        raise ConfigError(f"routing_stats_period_s {ray.routing_stats_period_s:g}: expected more than 0")


def _check_slice(settings: AppSettings) -> None:
    own, num_hosts = settings.ray, settings.config.hosts.num_hosts
    if not own.tpu_slice:
        return
    if not re.fullmatch(r"v\d\w*-\d+", own.tpu_slice):
        raise ConfigError(f"tpu_slice {own.tpu_slice!r}: expected a type and its number, such as v5e-16 or v6e-16")
    if num_hosts == 1:
        raise ConfigError(
            f"tpu_slice {own.tpu_slice}: needs num_hosts of 2 or more; for chips of one host set resources"
        )
    if own.num_gpus or "TPU" in own.resources:
        name = "num_gpus" if own.num_gpus else "resources.TPU"
        raise ConfigError(f"{name}: tpu_slice reserves all chips of the slice, and nothing else has devices")
