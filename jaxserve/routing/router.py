"""The router: replicas, a policy, and the routes of running requests. One thread uses it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, Literal, TypeAlias, get_args

from jaxserve.errors import UnavailableError
from jaxserve.routing.page_affinity import PageAffinity
from jaxserve.routing.policy import LeastTokens, RoundRobin, RoutingPolicy
from jaxserve.routing.replica import Replica, ReplicaId, Route
from jaxserve.routing.request import RouteRequest
from jaxserve.routing.text_prefix import TextPrefix

PolicyName: TypeAlias = Literal["prefix", "least-tokens", "round-robin", "text-prefix"]
POLICY_NAMES: Final[tuple[PolicyName, ...]] = get_args(PolicyName)


def make_policy(name: PolicyName, *, max_imbalance_tokens: int | None = None) -> RoutingPolicy:
    """Return a new policy. max_imbalance_tokens: for `prefix`; None: its default."""
    match name:
        case "round-robin":
            return RoundRobin()
        case "least-tokens":
            return LeastTokens()
        case "text-prefix":
            return TextPrefix()
        case "prefix":
            return PageAffinity() if max_imbalance_tokens is None else PageAffinity(max_imbalance_tokens)


class Router:
    """Routes requests to replicas that come and go."""

    def __init__(
        self, policy: RoutingPolicy, replica_ids: Iterable[ReplicaId] = (), *, sends_snapshots: bool = False
    ) -> None:
        """sends_snapshots: True if replicas report their pages by `HeldPages.replace`, False if by `change`."""
        self._policy = policy
        self._sends_snapshots = sends_snapshots
        self.replicas: dict[ReplicaId, Replica] = {}
        for replica_id in replica_ids:
            self.add(replica_id)

    def add(self, replica_id: ReplicaId) -> Replica:
        """Add a replica without load and pages, or return the known one."""
        return self.replicas.setdefault(replica_id, Replica(replica_id))

    def remove(self, replica_id: ReplicaId) -> None:
        """Forget a replica. Routes to it may still be ended."""
        self.replicas.pop(replica_id, None)
        self._policy.forget(replica_id)

    def forget_cache(self, replica_id: ReplicaId) -> None:
        """Forget what a replica held: its engine was restarted."""
        self.replicas[replica_id].pages.clear()
        self._policy.forget(replica_id)

    def rank(self, request: RouteRequest, candidates: Collection[ReplicaId] | None = None) -> list[Replica]:
        """Return the candidates, best first. candidates: replicas that may be chosen; None: all."""
        known = self.replicas.values()
        return self._policy.rank(
            request, [replica for replica in known if candidates is None or replica.replica_id in candidates]
        )

    def commit(self, request: RouteRequest, replica_id: ReplicaId) -> Route:
        """Count the request on the replica that takes it. The caller ends the route."""
        self._policy.note_routed(request, replica_id)
        return Route(self.add(replica_id), request, sends_snapshots=self._sends_snapshots)

    def route(self, request: RouteRequest, candidates: Collection[ReplicaId] | None = None) -> Route:
        """Choose a replica and count the request on it. Raises UnavailableError without a candidate."""
        ranked = self.rank(request, candidates)
        if not ranked:
            raise UnavailableError("No replica is ready.")
        return self.commit(request, ranked[0].replica_id)
