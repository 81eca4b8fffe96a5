"""Exact prefix affinity: prefers the replica whose cached pages save the most work, within a bound on imbalance.

A replica's cost is its outstanding tokens plus the prompt tokens it would have to compute, which count `recompute_weight`
times: a prefix that is computed again delays the requests that wait on the replica, and evicts pages of others. A prefix
thus attracts requests as far as it is worth waiting for; when its replica is busier than that, another one computes it,
and a hot prefix spreads over as many replicas as it needs.

The cost follows NVIDIA Dynamo's KV router (prefill blocks times a weight, plus active blocks), in tokens; the bound is
that of SGLang's cache-aware router.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.routing.policy import by_load
from jaxserve.routing.replica import Replica, ReplicaId
from jaxserve.routing.request import RouteRequest


@dataclass(frozen=True, slots=True)
class PageAffinity:
    """Looks up the prompt's page hashes among those that each replica has published."""

    max_imbalance_tokens: int = 16_384
    """The most outstanding tokens that a preferred replica may have beyond those of the least loaded one."""
    recompute_weight: float = 2.0
    """Cost of a prompt token that must be computed, in outstanding tokens."""

    def rank(self, request: RouteRequest, replicas: Sequence[Replica]) -> list[Replica]:
        if not replicas:
            return []
        limit = min(replica.outstanding_tokens for replica in replicas) + self.max_imbalance_tokens

        def cost(replica: Replica) -> tuple[bool, float]:
            num_computed = request.num_prompt_tokens - replica.num_cached_tokens(request)
            is_over = replica.outstanding_tokens > limit
            return is_over, replica.outstanding_tokens + (0.0 if is_over else self.recompute_weight * num_computed)

        return sorted(replicas, key=lambda replica: (*cost(replica), *by_load(replica)))

    def note_routed(self, request: RouteRequest, replica_id: ReplicaId) -> None:
        """Pages of routed requests are counted by `Route`."""

    def forget(self, replica_id: ReplicaId) -> None:
        """Pages belong to `Replica`, which is dropped with its router's entry."""
