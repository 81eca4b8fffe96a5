"""The request router and the autoscaling policy in Ray Serve's plug-ins, which are alpha: nothing else uses them."""

from __future__ import annotations

from base64 import b64decode
from math import ceil
from typing import Any

from ray.serve.config import AutoscalingContext
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from jaxserve.http.operations.routing import PAGE_KEY_BYTES
from jaxserve.ray.wire import WireRequest
from jaxserve.routing.replica import ReplicaId, Route
from jaxserve.routing.router import PolicyName, Router, make_policy
from jaxserve.types import BlockHash


class PageRequestRouter(RequestRouter):  # type: ignore[misc]  # ray has no types here
    """Routes by the policies of `jaxserve.routing`, with the pages that replicas report in their routing stats."""

    def initialize_state(self, routing: PolicyName = "prefix", max_imbalance_tokens: int | None = None) -> None:
        """Take `request_router_kwargs`."""
        self._router = Router(make_policy(routing, max_imbalance_tokens=max_imbalance_tokens), sends_snapshots=True)
        self._routes: dict[str, Route] = {}
        self._versions: dict[str, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return every candidate in a rank of its own, best first.

        The replica that stores the response of the request comes first, even on a retry; the one to avoid comes last otherwise.
        """
        wire = None if pending_request is None else next(iter(pending_request.args), None)
        if not isinstance(wire, WireRequest):
            return [candidate_replicas]
        by_id = {_id_of(replica.replica_id): replica for replica in candidate_replicas}
        self._update(by_id)
        ranked = [by_id[replica.replica_id] for replica in self._router.rank(wire.route, by_id.keys())]
        ranked.sort(key=lambda replica: _id_of(replica.replica_id) == wire.avoid)
        ranked.sort(key=lambda replica: _id_of(replica.replica_id) != wire.stored_at)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [[replica] for replica in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count the request on the replica that took it."""
        wire = next(iter(pending_request.args), None)
        if isinstance(wire, WireRequest):
            route = self._router.commit(wire.route, _id_of(replica_id))
            self._routes[pending_request.metadata.internal_request_id] = route

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Stop counting the request."""
        if (route := self._routes.pop(internal_request_id, None)) is not None:
            route.end()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget the replica."""
        super().on_replica_actor_died(replica_id)
        self._forget(_id_of(replica_id))

    def _update(self, replicas: dict[ReplicaId, RunningReplica]) -> None:
        """Take what replicas have reported since the last choice; forget those that are gone."""
        current = {_id_of(replica.replica_id) for replica in self.curr_replicas.values()} | replicas.keys()
        for replica_id in self._router.replicas.keys() - current:
            self._forget(replica_id)
        for replica_id, running in replicas.items():
            known, stats = self._router.add(replica_id), running.routing_stats
            version = stats.get("version")  # absent if the server was too slow to tell
            if version is not None and version != self._versions.get(replica_id):
                self._versions[replica_id] = version
                known.pages.replace(unpacked_pages(stats["pages"]))

    def _forget(self, replica_id: ReplicaId) -> None:
        self._router.remove(replica_id)
        self._versions.pop(replica_id, None)


class QueuedTokensPolicy:
    """Scales so that no replica has more than `target_queued_tokens` prompt tokens waiting, nor all of its places taken."""

    BUSY_SHARE = 0.8
    """Share of the places of running requests beyond which another replica is wanted."""

    def __init__(self, target_queued_tokens: int) -> None:
        self._target_queued_tokens = target_queued_tokens

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of replicas, and the state to keep, which is none."""
        metrics = context.aggregated_metrics or {}
        queued = sum(metrics.get("queued_tokens", {}).values())
        busy = sum(metrics.get("busy_share", {}).values())
        wanted = max(ceil(queued / self._target_queued_tokens), ceil(busy / self.BUSY_SHARE))
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max(wanted, least), most), {}


def unpacked_pages(packed: str) -> list[BlockHash]:
    """Return the page keys in base64 text."""
    data = b64decode(packed)
    return [BlockHash(data[start : start + PAGE_KEY_BYTES]) for start in range(0, len(data), PAGE_KEY_BYTES)]


def _id_of(replica_id: ReplicaID) -> ReplicaId:
    return ReplicaId(replica_id.unique_id)
