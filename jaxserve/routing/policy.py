"""The interface of routing policies, and the two that look at no content.

Policies are deterministic: equal calls in equal order give equal choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxserve.routing.replica import Replica, ReplicaId
from jaxserve.routing.request import RouteRequest


class RoutingPolicy(Protocol):
    """Ranks replicas for a request."""

    def rank(self, request: RouteRequest, replicas: Sequence[Replica]) -> list[Replica]:
        """Return all of `replicas` in the order in which to try them, best first. Changes nothing."""
        ...

    def note_routed(self, request: RouteRequest, replica_id: ReplicaId) -> None:
        """Record the replica that took the request; called once per route."""
        ...

    def forget(self, replica_id: ReplicaId) -> None:
        """Forget a replica that is gone or has lost its cache."""
        ...


def by_load(replica: Replica) -> tuple[int, int, int, ReplicaId]:
    """Return the sort key of the least loaded replica: tokens, then requests, then pages (new prefixes go to the emptiest cache)."""
    return replica.outstanding_tokens, replica.num_requests, len(replica.pages), replica.replica_id


class RoundRobin:
    """Gives each replica the same number of requests."""

    def __init__(self) -> None:
        self._num_routed = 0

    def rank(self, request: RouteRequest, replicas: Sequence[Replica]) -> list[Replica]:
        ordered = sorted(replicas, key=lambda replica: replica.replica_id)
        start = self._num_routed % len(ordered) if ordered else 0
        return ordered[start:] + ordered[:start]

    def note_routed(self, request: RouteRequest, replica_id: ReplicaId) -> None:
        self._num_routed += 1

    def forget(self, replica_id: ReplicaId) -> None:
        """Nothing is remembered of a replica."""


class LeastTokens:
    """Prefers the replica with the fewest outstanding tokens."""

    def rank(self, request: RouteRequest, replicas: Sequence[Replica]) -> list[Replica]:
        return sorted(replicas, key=by_load)

    def note_routed(self, request: RouteRequest, replica_id: ReplicaId) -> None:
        """The load is counted by `Route`."""

    def forget(self, replica_id: ReplicaId) -> None:
        """Nothing is remembered of a replica."""
