"""Messages between the leader and its workers, as MessagePack."""

from __future__ import annotations

from typing import Final

import msgspec

PROTOCOL: Final = 1
"""Version of these messages. Hosts of different versions refuse each other by name of this version."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message of the control channel."""


class HostStats(msgspec.Struct, frozen=True, array_like=True):
    """Counters and gauges of one host."""

    num_steps: int
    """Steps submitted to its devices since the engine started."""
    memory_bytes: int
    """Bytes in use on its devices; on CPUs, the resident memory of its process."""


class Join(Message, frozen=True):
    """The first message of a worker, repeated until it is answered."""

    rank: int
    host_id: str
    """Chosen at random by the process that starts the host's workers: equal for a worker and its successors."""
    incarnation: str
    """Chosen at random by each worker."""
    host_name: str
    shared_settings: dict[str, str]
    """Versions and settings that must be equal on all hosts, by name."""


class Values(Message, frozen=True):
    """A worker's part of an exchange."""

    topic: str
    values: dict[str, str]


class Alive(Message, frozen=True):
    """A sign of life."""

    stats: HostStats | None = None
    """Set by workers that serve."""


class Failed(Message, frozen=True):
    """The worker ends; the reason in one line."""

    reason: str
    is_final: bool = True
    """False if another start may succeed, such as when a driver or the network failed."""


class Left(Message, frozen=True):
    """The last message of a worker that stops as it was asked to."""


class Welcome(Message, frozen=True):
    """All hosts have joined."""

    coordinator: str
    """Address of the coordination service of `jax.distributed`."""
    plans: str
    """ZeroMQ address of the plans."""


class Refused(Message, frozen=True):
    """The engine cannot start with this worker: end with exit code 2."""

    reason: str


class Agreed(Message, frozen=True):
    """The values of all hosts in an exchange, by rank."""

    topic: str
    values: list[dict[str, str]]


class Restart(Message, frozen=True):
    """The engine ends and is started again: end with exit code 1."""

    reason: str


class Stop(Message, frozen=True):
    """The server ends: end with exit code 0."""


ToLeader = Join | Values | Alive | Failed | Left
ToWorker = Welcome | Refused | Agreed | Alive | Restart | Stop

TO_LEADER: Final[msgspec.msgpack.Decoder[ToLeader]] = msgspec.msgpack.Decoder(ToLeader)
TO_WORKER: Final[msgspec.msgpack.Decoder[ToWorker]] = msgspec.msgpack.Decoder(ToWorker)


def encode(message: ToLeader | ToWorker) -> bytes:
    """Return the frame of `message`."""
    return msgspec.msgpack.encode(message)
