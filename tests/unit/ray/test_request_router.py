"""The plug-ins of Ray Serve, with Ray's own classes and without a cluster."""

from __future__ import annotations

from base64 import b64encode
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs `jaxserve[ray]`: make scale-check")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from jaxserve.http.operations.routing import PAGE_KEY_BYTES
from jaxserve.ray.request_router import PageRequestRouter, QueuedTokensPolicy
from jaxserve.ray.wire import WireRequest
from jaxserve.routing.request import RouteRequest
from jaxserve.types import BlockHash

pytestmark = pytest.mark.scale

DEPLOYMENT = DeploymentID(name="engine", app_name="jaxserve")
PAGES = tuple(BlockHash(bytes([number]) * PAGE_KEY_BYTES) for number in range(4))


def replica(name: str, pages: tuple[BlockHash, ...] = (), version: int = 1) -> Any:
    stats = {"version": version, "pages": b64encode(b"".join(pages)).decode()}
    return SimpleNamespace(replica_id=ReplicaID(name, DEPLOYMENT), routing_stats=stats)


def pending(name: str, avoid: str | None = None, stored_at: str | None = None) -> PendingRequest:
    route = RouteRequest(num_prompt_tokens=70, num_output_tokens=5, pages=PAGES)
    wire = WireRequest("POST", "/v1/completions", (), b"", route, stored_at, avoid)
    return PendingRequest(args=[wire], kwargs={}, metadata=RequestMetadata(request_id=name, internal_request_id=name))


@pytest.fixture
async def router() -> PageRequestRouter:
    made = PageRequestRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA)
    made.initialize_state(routing="prefix", max_imbalance_tokens=100)
    return made


async def order(router: PageRequestRouter, replicas: list[Any], request: PendingRequest | None) -> list[str]:
    return [one.replica_id.unique_id for rank in await router.choose_replicas(replicas, request) for one in rank]


async def test_replica_that_reports_the_pages_is_first_within_the_bound(router: PageRequestRouter) -> None:
    replicas = [replica("a"), replica("b", PAGES[:3]), replica("c")]
    assert (await order(router, replicas, pending("r")))[0] == "b"
    for number in range(10):
        router.on_request_routed(pending(f"r{number}"), replicas[1].replica_id, None)
    assert (await order(router, replicas, pending("r")))[-1] == "b", "beyond the bound"
    for number in range(10):
        router.on_request_completed(replicas[1].replica_id, f"r{number}")
    assert (await order(router, replicas, pending("r")))[0] == "b"


async def test_new_report_replaces_the_last_one(router: PageRequestRouter) -> None:
    await order(router, [replica("a"), replica("b", PAGES)], pending("r"))
    assert (await order(router, [replica("a", PAGES, 2), replica("b", (), 2)], pending("r")))[0] == "a"


async def test_missing_report_leaves_the_last_one(router: PageRequestRouter) -> None:
    silent = replica("b")
    await order(router, [replica("a"), replica("b", PAGES)], pending("r"))
    silent.routing_stats = {}
    assert (await order(router, [replica("a"), silent], pending("r")))[0] == "b"


async def test_replica_that_failed_the_request_comes_last(router: PageRequestRouter) -> None:
    assert await order(router, [replica("a"), replica("b", PAGES)], pending("r", avoid="b")) == ["a", "b"]


async def test_replica_that_stores_the_named_response_is_first(router: PageRequestRouter) -> None:
    """Another one would answer that there is no such response."""
    replicas = [replica("a"), replica("b", PAGES), replica("c")]
    assert await order(router, replicas, pending("r", stored_at="c")) == ["c", "b", "a"]
    assert await order(router, replicas, pending("r", avoid="c", stored_at="c")) == ["c", "b", "a"]
    assert await order(router, replicas, pending("r", stored_at="gone")) == ["b", "a", "c"]


async def test_replica_that_is_gone_is_forgotten(router: PageRequestRouter) -> None:
    both = [replica("a"), replica("b", PAGES)]
    await order(router, both, pending("r"))
    router.on_replica_actor_died(both[1].replica_id)
    assert await order(router, [both[0]], pending("r")) == ["a"]
    assert set(router._router.replicas) == {"a"}


async def test_calls_without_a_request_take_any_replica(router: PageRequestRouter) -> None:
    assert await order(router, [replica("a"), replica("b")], None) == ["a", "b"]


@pytest.mark.parametrize(
    ("queued", "busy", "wanted"),
    [([0, 0], [0, 0], 1), ([2500, 0], [0, 0], 3), ([0, 0], [1.0, 0.7], 3), ([9999, 1], [0, 0], 4)],
)
def test_autoscaling_follows_queued_tokens_and_taken_places(
    queued: list[float], busy: list[float], wanted: int
) -> None:
    context: Any = SimpleNamespace(
        aggregated_metrics={"queued_tokens": dict(enumerate(queued)), "busy_share": dict(enumerate(busy))},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
    )
    assert QueuedTokensPolicy(target_queued_tokens=1000)(context) == (wanted, {})
