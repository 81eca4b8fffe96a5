"""Routing policies and the router: which replica gets a request, and what is counted on it."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.errors import UnavailableError
from jaxserve.kv.manager import KVManager
from jaxserve.routing.page_affinity import PageAffinity
from jaxserve.routing.pages import HeldPages
from jaxserve.routing.policy import LeastTokens, RoundRobin
from jaxserve.routing.replica import ReplicaId
from jaxserve.routing.request import ReplyLengths, RouteRequest, page_hashes, prompt_hashes
from jaxserve.routing.router import POLICY_NAMES, PolicyName, Router, make_policy
from jaxserve.routing.text_prefix import CHUNK_CHARS, TextPrefix
from jaxserve.types import BlockHash

A, B, C = (ReplicaId(name) for name in "abc")


def pages(text: str) -> tuple[BlockHash, ...]:
    """Return one made-up page hash per character, chained like those of an engine."""
    return tuple(BlockHash(text[: end + 1].encode()) for end in range(len(text)))


def request(text: str = "", *, tail: int = 8, output: int = 10) -> RouteRequest:
    """Return a request with one page of 16 tokens per character of `text`, then `tail` tokens."""
    return RouteRequest(
        num_prompt_tokens=16 * len(text) + tail, num_output_tokens=output, pages=pages(text), block_size=16, text=text
    )


def names(router: Router, wanted: RouteRequest) -> str:
    return "".join(replica.replica_id for replica in router.rank(wanted))


def test_round_robin_gives_each_replica_its_turn() -> None:
    router = Router(RoundRobin(), [C, A, B])
    chosen = [router.route(request()).replica.replica_id for _ in range(7)]
    assert chosen == [A, B, C, A, B, C, A]
    assert names(router, request()) == "bca"


def test_least_tokens_counts_tokens_and_not_requests() -> None:
    router = Router(LeastTokens(), [A, B])
    router.commit(request(tail=100), A)
    short = [router.route(request(tail=5)).replica.replica_id for _ in range(3)]
    assert short == [B, B, B]


def test_tokens_are_outstanding_until_computed_or_ended() -> None:
    router = Router(LeastTokens(), [A])
    route = router.route(request("xy", tail=8, output=10))
    assert route.replica.outstanding_tokens == 2 * 16 + 8 + 10
    route.note_output(1)
    assert route.replica.outstanding_tokens == 9, "the prompt is computed"
    route.note_output(30)
    assert route.replica.outstanding_tokens == 1, "a running request longer than expected has a token left"
    route.end()
    route.end()
    route.note_output(1)
    assert (route.replica.outstanding_tokens, route.replica.num_requests) == (0, 0)


def test_cached_prompt_tokens_are_not_outstanding() -> None:
    router = Router(LeastTokens(), [A])
    router.replicas[A].pages.change(pages("xyz"), ())
    route = router.route(request("xyw", tail=8, output=10))
    assert route.num_cached_tokens == 2 * 16
    assert route.replica.outstanding_tokens == 16 + 8 + 10


def test_prefix_prefers_the_longest_published_prefix() -> None:
    router = Router(PageAffinity(), [A, B, C])
    router.replicas[B].pages.change(pages("xy"), ())
    router.replicas[C].pages.change(pages("xyz"), ())
    assert names(router, request("xyzw")) == "cba"


def test_prefix_needs_every_page_before_a_match() -> None:
    """A page without its predecessors cannot be used: the engine looks pages up from the first one."""
    router = Router(PageAffinity(), [A, B])
    router.replicas[B].pages.change(pages("xyz")[1:], ())
    assert router.replicas[B].num_cached_tokens(request("xyz")) == 0


@pytest.mark.parametrize("num_pages", [0, 1, 2, 3, 7, 8, 9, 33])
def test_every_length_of_a_held_prefix_is_found(num_pages: int) -> None:
    wanted = pages("x" * num_pages)
    for num_held in range(num_pages + 1):
        held = HeldPages()
        held.change(wanted[:num_held], ())
        assert held.num_leading(wanted) == num_held


def test_evicted_pages_attract_nothing() -> None:
    router = Router(PageAffinity(), [A, B])
    router.replicas[B].pages.change(pages("xyz"), ())
    router.replicas[B].pages.change((), pages("xyz"))
    assert names(router, request("xyz")) == "ab"


def test_requests_with_the_same_new_prefix_follow_the_first() -> None:
    """The first has published nothing yet; until it ends its pages are expected."""
    router = Router(PageAffinity(), [A, B])
    first = router.route(request("xyz"))
    assert first.replica.replica_id == A
    assert router.route(request("xyz")).replica.replica_id == A
    assert router.route(request("uvw")).replica.replica_id == B, "another prefix goes to the idle replica"


def test_an_ended_request_leaves_only_what_its_replica_published() -> None:
    router = Router(PageAffinity(), [A, B])
    route = router.route(request("xyz"))
    route.end()
    assert route.replica.num_cached_tokens(request("xyz")) == 0


def test_a_prefix_attracts_as_long_as_it_is_worth_waiting_for() -> None:
    """Three cached pages save 48 tokens, weighed twice: beyond 96 outstanding tokens another replica computes them."""
    router = Router(PageAffinity(recompute_weight=2.0), [A, B])
    router.replicas[A].pages.change(pages("xyz"), ())
    router.commit(request(tail=85, output=10), A)
    assert names(router, request("xyz")) == "ab"
    router.commit(request(tail=1, output=1), A)
    assert names(router, request("xyz")) == "ba"


def test_the_bound_on_imbalance_overrules_affinity() -> None:
    router = Router(PageAffinity(max_imbalance_tokens=50), [A, B, C])
    router.replicas[A].pages.change(pages("x" * 1000), ())
    router.commit(request(tail=40, output=10), A)
    assert names(router, request("x" * 1000))[0] == "a", "50 tokens more are within the bound"
    router.commit(request(tail=1, output=1), A)
    assert names(router, request("x" * 1000)) == "bca"


def test_load_never_differs_by_more_than_the_bound_and_one_request() -> None:
    """All requests share one prefix, which draws every one of them to the same replica."""
    bound, one = 500, request("x" * 10, tail=20, output=80)
    router = Router(PageAffinity(bound), [A, B, C])
    for _ in range(200):
        router.route(one)
        loads = [replica.outstanding_tokens for replica in router.replicas.values()]
        assert max(loads) - min(loads) <= bound + 10 * 16 + 100


def test_new_prefixes_go_to_the_emptiest_cache_among_idle_replicas() -> None:
    router = Router(PageAffinity(), [A, B])
    router.replicas[A].pages.change(pages("uvw"), ())
    assert names(router, request("xyz")) == "ba"


def test_new_prefixes_go_to_several_replicas_before_any_of_them_reports() -> None:
    router = Router(PageAffinity(), [A, B], sends_snapshots=True)
    chosen = []
    for name in ("uvw", "xyz"):
        route = router.route(request(name))
        chosen.append(route.replica.replica_id)
        route.end()
    assert set(chosen) == {A, B}


def test_a_restarted_engine_holds_nothing() -> None:
    router = Router(PageAffinity(), [A, B])
    router.replicas[B].pages.change(pages("xyz"), ())
    router.forget_cache(B)
    assert router.replicas[B].num_cached_tokens(request("xyz")) == 0


def test_a_snapshot_covers_requests_that_ended_before_the_one_before_it() -> None:
    router = Router(PageAffinity(), [A], sends_snapshots=True)
    route = router.route(request("xyz"))
    held = route.replica.pages
    held.replace([])
    assert held.num_leading(pages("xyz")) == 3, "still running"
    route.end()
    held.replace([])
    assert held.num_leading(pages("xyz")) == 3, "this snapshot may be older than the end"
    held.replace(pages("xy"))
    assert held.num_leading(pages("xyz")) == 2


def test_page_hashes_are_those_of_the_engine() -> None:
    tokens = np.arange(1, 50, dtype=np.int32)
    manager = KVManager(num_blocks=16, block_size=16, max_model_len=64)
    for salt, adapter in ((None, 0), ("tenant", 0), (None, 2)):
        table = manager.new_table(salt, adapter)
        assert manager.start(table, tokens) == 0
        manager.publish(table, tokens, len(tokens))
        hashes = page_hashes(tokens, 16, salt, adapter)
        assert len(hashes) == 3
        assert all(manager.pool.find(page) is not None for page in hashes)
        manager.free(table)
    assert len(page_hashes(tokens[:48], 16)) == 2, "the last token is always computed"


@pytest.mark.parametrize("length", [0, 1, 17, 65_536, 70_000])
def test_hashes_of_a_list_are_those_of_its_array(length: int) -> None:
    prompt = list(range(length))
    assert prompt_hashes(prompt, 16, "tenant", 2) == page_hashes(np.array(prompt, np.int32), 16, "tenant", 2)


def test_text_prefix_follows_the_longest_matching_text() -> None:
    router = Router(TextPrefix(), [A, B])
    long = "s" * 3 * CHUNK_CHARS
    router.commit(request(long), B)
    assert names(router, request(long + "question"))[0] == "b"
    assert names(router, request("other" * CHUNK_CHARS))[0] == "a", "without a match the replica with the least text"


def test_text_prefix_yields_to_the_load_beyond_its_threshold() -> None:
    router = Router(TextPrefix(imbalanced_threshold=2), [A, B])
    text = "s" * 3 * CHUNK_CHARS
    for _ in range(3):
        assert names(router, request(text))[0] == "a"
        router.commit(request(text), A)
    assert names(router, request(text))[0] == "b"


def test_text_prefix_forgets_the_oldest_text_first() -> None:
    policy = TextPrefix(max_chars=3 * CHUNK_CHARS)
    router = Router(policy, [A, B])
    first, second = "f" * 2 * CHUNK_CHARS, "s" * 2 * CHUNK_CHARS
    router.commit(request(first), A).end()
    router.commit(request(second), A).end()
    router.commit(request("z" * 3 * CHUNK_CHARS), B).end()
    assert names(router, request(second))[0] == "a"
    assert names(router, request("f" * CHUNK_CHARS))[0] == "a", "one chunk of the first text is left"
    policy.forget(A)
    assert names(router, request(second))[0] == "a", "nothing is known of A: it has the least text"
    assert names(router, request("z" * CHUNK_CHARS))[0] == "b"


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_ranks_each_candidate_once_and_repeatably(name: PolicyName) -> None:
    def run() -> list[str]:
        router = Router(make_policy(name), [A, B, C])
        order = []
        for index in range(30):
            wanted = request("xyz"[: index % 4] * 20, tail=1 + 7 * index % 90)
            ranked = names(router, wanted)
            assert sorted(ranked) == ["a", "b", "c"]
            order.append(ranked)
            route = router.route(wanted)
            if index % 3:
                route.end()
        return order

    assert run() == run()


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_only_candidates_are_chosen(name: PolicyName) -> None:
    router = Router(make_policy(name), [A, B, C])
    assert {router.route(request("xyz"), {B}).replica.replica_id for _ in range(5)} == {B}
    with pytest.raises(UnavailableError, match="No replica is ready"):
        router.route(request("xyz"), set())


def test_a_route_to_a_removed_replica_can_be_ended() -> None:
    router = Router(LeastTokens(), [A, B])
    route = router.route(request())
    router.remove(A)
    route.end()
    assert names(router, request()) == "b"


def test_expected_reply_lengths_follow_the_traffic_below_the_limit() -> None:
    lengths = ReplyLengths(first_estimate=128)
    assert lengths.expected(1000) == 128
    assert lengths.expected(10) == 10
    for _ in range(500):
        lengths.record(20)
    assert lengths.expected(1000) == 20
