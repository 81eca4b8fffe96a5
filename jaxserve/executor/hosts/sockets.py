"""ZeroMQ sockets over TCP between hosts, and the entry into the program of `jax.distributed`.

TRUST: hosts trust their network. Neither these sockets nor those of `jax.distributed` and its collectives authenticate
or encrypt, so every port between the hosts belongs into a private network (docs/security.md).
"""

from __future__ import annotations

import socket
import time
from typing import Any, Final

import zmq

from jaxserve.config import HostsConfig
from jaxserve.errors import ConfigError, StartupError

MAX_FRAME_BYTES: Final = 256 << 20
BEATS: Final = 10
"""Signs of life within `--host-timeout`. A host is lost when so many are missing."""
START_TIMEOUT_S: Final = 60.0
"""Used instead of a shorter `--host-timeout` until the engine serves: drivers and compilers may hold a process up."""
SHOW_S: Final = 30.0
"""Time after which the log of each host says which hosts it waits for, and again after that."""
_CONNECT_S: Final = 5.0
_RETRY_S: Final = 0.1


def resolve_host(host: str, port: int) -> str:
    """Return the numeric address of `host`. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--coordinator {host}:{port}: the host cannot be resolved: {error.strerror}") from error
    return str(found[0][4][0])


def endpoint(address: str, port: int | str) -> str:
    """Return the ZeroMQ endpoint of a numeric address; port `*` is any free one."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def tcp_socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[Any]:
    """Return a socket that drops no message while its peer is connected, and none of whose messages delay its end."""
    made: zmq.Socket[Any] = context.socket(kind)
    for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0), (zmq.MAXMSGSIZE, MAX_FRAME_BYTES)):
        made.setsockopt(option, value)
    made.setsockopt(zmq.IPV6, 1)
    return made


def bind(made: zmq.Socket[Any], address: str, port: int | str, setting: str) -> str:
    """Listen on an address, and return the endpoint. Raises ConfigError in the name of `setting`."""
    try:
        made.bind(endpoint(address, port))
    except zmq.ZMQError as error:
        raise ConfigError(f"{setting}: cannot listen on {address} port {port}: {error.strerror}") from error
    return str(made.getsockopt_string(zmq.LAST_ENDPOINT))


def free_port(address: str) -> int:
    """Return a port that no process listens on."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def join_program(config: HostsConfig, coordinator: str) -> None:
    """Make this process one of the program's; returns when all hosts have. Call it before anything uses a device.

    coordinator: address of the service that host 0 runs for it. Raises StartupError if this host cannot reach it.
    """
    import jax

    if config.rank:
        _await_listener(coordinator, START_TIMEOUT_S)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from the engine
    # A host that is gone is found by our own signs of life, which come sooner; this time-out is a second net. It aborts all
    # hosts, also at the start, so compilers on busy processors must not reach it.
    jax.distributed.initialize(
        coordinator,
        config.num_hosts,
        config.rank,
        initialization_timeout=int(config.host_join_timeout),
        heartbeat_timeout_seconds=int(2 * max(START_TIMEOUT_S, config.host_timeout)),
        coordinator_bind_address=coordinator if config.rank == 0 else None,
    )


def _await_listener(address: str, timeout_s: float) -> None:
    """Wait until host 0 listens on `address`. Raises StartupError; `jax.distributed` would abort this process."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout_s
    while (error := unreachable(host.strip("[]"), int(port))) is not None:
        if time.monotonic() > deadline:
            raise StartupError(
                f"host 0 cannot be reached at {address}: {error} (hosts use free ports: all of them must be open between the "
                "hosts)"
            )
        time.sleep(_RETRY_S)


def unreachable(host: str, port: int) -> str | None:
    """Return the error of a connection to a port; None if a process takes it."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
