"""The workers of one engine as its leader knows them: who has joined, and who is alive. No sockets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxserve.executor.hosts.agreement import difference
from jaxserve.executor.hosts.messages import HostStats, Join


class HostLostError(Exception):
    """A host is gone: the engine cannot run any further step. The message is one line."""


class RefusedError(Exception):
    """A process that wants to join cannot be part of this engine. The message is one line."""


@dataclass(slots=True)
class Member:
    """One worker."""

    join: Join
    identity: bytes
    """Name of its connection."""
    num_missed: int = 0
    """Beats since its last message."""
    stats: HostStats = field(default=HostStats(0, 0))
    has_left: bool = False

    @property
    def name(self) -> str:
        return f"host {self.join.rank} ({self.join.host_name})"


class Members:
    """The workers by rank."""

    def __init__(self, num_hosts: int, shared_settings: Mapping[str, str]) -> None:
        """shared_settings: those of this host, which all others must share."""
        self._num_hosts = num_hosts
        self._shared_settings = shared_settings
        self._by_rank: dict[int, Member] = {}
        self._replaced_ids: set[str] = set()
        """Host ids of members that another host has replaced. One of them that still asks to join is a second host of its rank."""
        self.is_closed = False
        """True once the engine has begun with the members it has."""

    @property
    def all(self) -> list[Member]:
        """The members, by rank."""
        return [self._by_rank[rank] for rank in sorted(self._by_rank)]

    @property
    def is_complete(self) -> bool:
        return len(self._by_rank) == self._num_hosts - 1

    @property
    def missing(self) -> str:
        """The hosts that have not joined, in words."""
        return ", ".join(f"host {rank}" for rank in range(1, self._num_hosts) if rank not in self._by_rank)

    @property
    def stats(self) -> dict[int, HostStats]:
        """The last numbers of each worker, by rank."""
        return {member.join.rank: member.stats for member in self.all}

    def find(self, identity: bytes) -> Member | None:
        """Return the member with this connection."""
        return next((member for member in self._by_rank.values() if member.identity == identity), None)

    def join(self, identity: bytes, join: Join) -> None:
        """Add a worker, or replace one that was started again. Before the engine begins its whole host may be, with another id.

        Raises RefusedError if it cannot be a member, and HostLostError if it follows one that the engine has begun with.
        """
        name = f"host {join.rank} ({join.host_name})"
        known = self._by_rank.get(join.rank)
        if known is not None and known.join.host_id != join.host_id:
            if self.is_closed or join.host_id in self._replaced_ids:
                raise RefusedError(
                    f"two hosts have --host-rank {join.rank}: {known.join.host_name} and {join.host_name}"
                )
            self._replaced_ids.add(known.join.host_id)
        if known is not None and self.is_closed:
            if known.join.incarnation == join.incarnation:
                return  # it was sent before the answer to the one before
            raise HostLostError(f"{name} was started again")
        line = difference(name, join.shared_settings, self._shared_settings)
        if line is not None:
            raise RefusedError(line)
        if not 0 < join.rank < self._num_hosts:
            raise RefusedError(f"{name}: --host-rank must be between 1 and {self._num_hosts - 1}")
        if known is None or known.join.incarnation != join.incarnation:
            self._by_rank[join.rank] = Member(join, identity)

    def beat(self, most_missed: int, interval_s: float) -> None:
        """Count a beat. Raises HostLostError if a member has been silent for more than `most_missed` of them."""
        for member in self._by_rank.values():
            member.num_missed += 1
            if member.num_missed > most_missed:
                raise HostLostError(f"{member.name} has been silent for {most_missed * interval_s:g} s")
