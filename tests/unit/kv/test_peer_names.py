"""A host name in `--kv-peers` stands for all its addresses, which come and go while the engine serves."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from jaxserve.config import TierConfig
from jaxserve.errors import ConfigError
from jaxserve.kv.tiers.peer import Peers, PeerStore
from jaxserve.kv.tiers.stats import TierStats
from jaxserve.kv.tiers.wire import endpoints_of
from jaxserve.tools.bench.startup import free_port
from tests.engine.rig import Rig, add, expected, prompt
from tests.unit.kv.test_peers import LAYOUT, NAMES, TOKEN, served

NO_ADDRESS = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


class Resolver:
    """Resolves every host to what a test sets."""

    def __init__(self, answer: list[str] | OSError) -> None:
        self._answer = answer
        self.calls = threading.Semaphore(0)
        self.may_answer = threading.Event()
        self.may_answer.set()

    def __call__(self, host: str) -> list[str]:
        answer = self._answer
        self.calls.release()
        assert self.may_answer.wait(60)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def set(self, answer: list[str] | OSError) -> None:
        """Change the answer, and return once it was used: the call after the next one has begun."""
        self._answer = answer
        while self.calls.acquire(blocking=False):
            pass
        for _ in range(2):
            assert self.calls.acquire(timeout=60)

    @contextmanager
    def hangs(self) -> Iterator[None]:
        """Let calls hang; the first one hangs already in the body."""
        self.may_answer.clear()
        while self.calls.acquire(blocking=False):
            pass
        assert self.calls.acquire(timeout=60)
        try:
            yield
        finally:
            self.may_answer.set()


@pytest.fixture
def port() -> int:
    return free_port()


@contextmanager
def following(
    resolver: Callable[[str], list[str]],
    *entries: str,
    stats: TierStats | None = None,
    token: str = TOKEN,
    own: str | None = None,
    start_s: float = 60.0,
) -> Iterator[Peers]:
    peers = Peers(
        LAYOUT,
        entries,
        token,
        60.0,
        stats or TierStats(),
        own=own,
        resolve=resolver,
        period_s=0.001,
        start_s=start_s,
    )
    with contextlib.closing(peers):
        yield peers


def hosts(peers: Peers) -> list[str]:
    """Return the hosts of the peers there are now."""
    return [
        peer.endpoint.removeprefix("tcp://").rpartition(":")[0] for store in peers.stores() for peer in store._peers
    ]


def store_of(peers: Peers) -> PeerStore:
    (store,) = peers.stores()
    return store


def test_a_name_stands_for_all_its_addresses_but_that_of_the_engine(port: int) -> None:
    resolver = Resolver(["10.0.0.3", "10.0.0.1", "fd00::4", "10.0.0.2", "10.0.0.3"])
    entries = f"10.0.0.9:{port}", f"pods:{port}", f"10.0.0.1:{port}"
    with following(resolver, *entries, own=f"tcp://10.0.0.2:{port}") as peers:
        assert hosts(peers) == ["10.0.0.9", "10.0.0.1", "10.0.0.3"]
    with following(Resolver(["10.0.0.2"]), f"pods:{port}", own=f"tcp://10.0.0.2:{port}") as peers:
        assert peers.stores() == []


def test_addresses_are_not_resolved(port: int) -> None:
    """The start would wait for an answer."""
    resolver = Resolver(NO_ADDRESS)
    with following(resolver, f"127.0.0.1:{port}", f"[::1]:{port}") as peers:
        assert hosts(peers) == ["127.0.0.1", "[::1]"]
        assert not resolver.calls.acquire(blocking=False)


def test_replicas_that_come_are_asked_and_those_that_go_are_dropped(port: int) -> None:
    resolver, stats = Resolver(["127.0.0.2"]), TierStats()
    with (
        served(2, f"tcp://127.0.0.2:{port}"),
        served(4, f"tcp://127.0.0.3:{port}"),
        following(resolver, f"pods:{port}", stats=stats) as peers,
    ):
        before = store_of(peers)
        assert before.num_leading(NAMES) == 2
        resolver.set(["127.0.0.3", "127.0.0.2"])
        both = store_of(peers)
        assert both.num_leading(NAMES) == 4
        assert both._peers[0] is before._peers[0], "it stays connected"
        resolver.set(["127.0.0.3"])
        assert hosts(peers) == ["127.0.0.3"]
        assert store_of(peers).num_leading(NAMES) == both.num_leading(NAMES) == 4
        assert before.num_leading(NAMES) == 0
        assert before._peers[0]._socket is None
    assert stats.take().failures == {}


def test_a_fetch_ends_when_the_replica_that_it_asks_goes(port: int) -> None:
    resolver, stats = Resolver(["127.0.0.2"]), TierStats()
    with (
        socket.create_server(("127.0.0.2", port)) as frozen,
        following(resolver, f"pods:{port}", stats=stats) as peers,
    ):
        asking = threading.Thread(target=store_of(peers).num_leading, args=(NAMES,))
        asking.start()
        with frozen.accept()[0]:
            resolver.set([])
            asking.join()
    assert stats.take().failures == {}


def test_a_name_that_cannot_be_resolved_any_more_keeps_its_peers_and_is_counted_once(port: int) -> None:
    resolver, stats = Resolver(["127.0.0.2"]), TierStats()
    with following(resolver, f"pods:{port}", stats=stats) as peers:
        resolver.set(NO_ADDRESS)
        resolver.set(NO_ADDRESS)
        assert hosts(peers) == ["127.0.0.2"]
        assert stats.take().failures == {"peer_name": 1}
        resolver.set(["127.0.0.3"])
        assert hosts(peers) == ["127.0.0.3"]


def test_an_engine_starts_before_its_peers_have_addresses(port: int) -> None:
    resolver, stats = Resolver(NO_ADDRESS), TierStats()
    with following(resolver, f"pods:{port}", stats=stats) as peers:
        assert peers.stores() == []
        resolver.set(["127.0.0.2"])
        assert hosts(peers) == ["127.0.0.2"]
    assert stats.take().failures == {}, "no fetch has failed"


@pytest.mark.parametrize(
    ("token", "address", "problem"),
    [
        (TOKEN, "8.8.8.8", r"8\.8\.8\.8 is no loopback or private address"),
        ("", "10.0.0.2", "an address beyond this host needs --kv-peer-token"),
    ],
)
def test_a_name_whose_addresses_may_not_be_used_is_refused(port: int, token: str, address: str, problem: str) -> None:
    """At the start that is an error; later it changes nothing, and is counted."""
    with pytest.raises(ConfigError, match=problem), following(Resolver([address]), f"pods:{port}", token=token):
        pass
    resolver, stats = Resolver(["127.0.0.2"]), TierStats()
    with following(resolver, f"pods:{port}", stats=stats, token=token) as peers:
        resolver.set(["127.0.0.3", address])
        assert hosts(peers) == ["127.0.0.2"]
        assert stats.take().failures == {"peer_name": 1}


def test_a_resolver_that_hangs_holds_up_neither_the_start_nor_fetches_nor_the_end(port: int) -> None:
    resolver, stats = Resolver(["127.0.0.2"]), TierStats()
    with served(2, f"tcp://127.0.0.2:{port}"), contextlib.ExitStack() as stack:
        peers = stack.enter_context(following(resolver, f"pods:{port}", stats=stats))
        with resolver.hangs():
            assert store_of(peers).num_leading(NAMES) == 2
            stack.close()
    resolver = Resolver(["8.8.8.8"])
    resolver.may_answer.clear()
    with following(resolver, f"pods:{port}", stats=stats, start_s=0.0) as peers:
        assert resolver.calls.acquire(timeout=60)
        assert peers.stores() == []
        resolver.may_answer.set()
        resolver.set(["127.0.0.2"])
        assert hosts(peers) == ["127.0.0.2"]
    assert stats.take().failures == {"peer_name": 1}, "an answer after the start does not end the engine"


def test_engines_of_one_name_fetch_from_each_other(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All have the same settings, but the address on which they listen."""
    addresses = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    monkeypatch.setattr("jaxserve.kv.tiers.wire._addresses_of", lambda host: addresses if host == "pods" else [host])
    engines = [
        Rig(
            tiers=TierConfig(
                kv_listen=f"{address}:{port}",
                kv_peers=f"pods:{port}",
                kv_offload_memory=1 << 20,
                kv_peer_token=TOKEN,
                kv_fetch="always",
                kv_fetch_timeout=60.0,
            )
        )
        for address in addresses
    ]
    for number, engine in enumerate(engines):
        engine.run(add("prompt", prompt(30, first=9 * number), max_tokens=1))
        assert engine.scheduler.take_stats().kv_tier_fetched_pages == {}
    for number in range(2):
        message = add(f"reply {number}", prompt(30, first=9 * number), max_tokens=9)
        assert engines[2].run(message)[message.request_id] == expected(message)
        stats = engines[2].scheduler.take_stats()
        assert (stats.kv_tier_fetched_pages, stats.kv_tier_failures) == ({"peer": 7}, {})
    for engine in engines:
        assert engine.tiers is not None
        engine.tiers.close()


def test_an_engine_with_addresses_of_both_families_is_one_peer() -> None:
    found = endpoints_of("pods:7001", "--kv-peers", TOKEN, lambda host: ["fd00::2", "10.0.0.2", "fd00::1", "10.0.0.1"])
    assert found == ["tcp://10.0.0.1:7001", "tcp://10.0.0.2:7001"]
    assert endpoints_of("pods:7001", "--kv-peers", TOKEN, lambda host: ["fd00::2"]) == ["tcp://[fd00::2]:7001"]
    with pytest.raises(ConfigError, match="2606:4700::1 is no loopback or private address"):
        endpoints_of("pods:7001", "--kv-peers", TOKEN, lambda host: ["10.0.0.1", "2606:4700::1"])
