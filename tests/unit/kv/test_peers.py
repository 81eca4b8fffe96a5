"""Pages move between engines over loopback; every failure of a peer ends in computing the prompt."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import zmq

from jaxserve.config import CacheConfig, Config, ModelConfig, TierConfig
from jaxserve.errors import ConfigError
from jaxserve.kv.tiers.host import HostStore
from jaxserve.kv.tiers.page import CacheBlock, PageLayout
from jaxserve.kv.tiers.peer import Peer, Peers, PeerStore
from jaxserve.kv.tiers.server import PageServer
from jaxserve.kv.tiers.stats import TierStats
from jaxserve.kv.tiers.wire import (
    MAX_HASHES,
    PageReply,
    PageRequest,
    WireError,
    endpoint_of,
    header_of,
    open_reply,
    open_request,
    secure_server,
)
from jaxserve.tools.bench.startup import free_port
from jaxserve.types import BlockHash
from tests.engine.rig import Rig, add, expected, prompt

LAYOUT = PageLayout("model", "int8", (CacheBlock("attention", "k", 24), CacheBlock("attention", "v", 8)))
NAMES = [BlockHash(bytes([i]) * 32) for i in range(6)]
TOKEN = "shared secret"


@contextmanager
def served(
    num_pages: int, endpoint: str, *, is_coming: Callable[[BlockHash], bool] = lambda _: False
) -> Iterator[HostStore]:
    store = HostStore(LAYOUT, 1 << 12, TierStats())
    for number in range(num_pages):
        store.put(NAMES[number], LAYOUT.views(np.arange(number, number + 32, dtype=np.uint8)))
    server = PageServer(LAYOUT, [store], is_coming, endpoint, TOKEN)
    try:
        yield store
    finally:
        server.close()


@pytest.fixture
def endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@contextmanager
def peer(
    endpoint: str,
    stats: TierStats,
    *,
    layout: PageLayout = LAYOUT,
    token: str = TOKEN,
    timeout_s: float = 10.0,
    clock: Callable[[], float] = lambda: 0.0,
) -> Iterator[PeerStore]:
    """Return the store of one peer."""
    with (
        zmq.Context() as context,
        contextlib.closing(Peer(layout, endpoint, token, timeout_s, stats, context, clock)) as one,
    ):
        yield PeerStore(layout, [one], timeout_s)


def test_pages_arrive_with_equal_bytes(endpoint: str) -> None:
    with served(3, endpoint), peer(endpoint, TierStats()) as store:
        assert store.num_leading(NAMES) == 3
        pages = [LAYOUT.new_page() for _ in NAMES]
        assert store.get(NAMES, pages) == 3
        for number in range(3):
            assert b"".join(block.tobytes() for block in pages[number]) == bytes(range(number, number + 32))
        assert store.num_leading(NAMES[3:]) == store.get(NAMES[3:], pages[3:]) == 0


def test_a_page_as_large_as_those_of_real_models_arrives(endpoint: str) -> None:
    """A limit on the bytes of a frame counts what its encryption adds."""
    layout = PageLayout("model", "int8", (CacheBlock("attention", "k", 1 << 21),))
    page = [np.full(1 << 21, 7, np.uint8)]
    store = HostStore(layout, 1 << 22, TierStats())
    store.put(NAMES[0], page)
    server = PageServer(layout, [store], lambda _: False, endpoint, TOKEN)
    with contextlib.closing(server), peer(endpoint, TierStats(), layout=layout) as client:
        found = layout.new_page()
        assert client.get(NAMES[:1], [found]) == 1
        np.testing.assert_array_equal(found, page)


def test_a_prefix_that_peers_ask_for_stays_and_loses_its_end_first(endpoint: str) -> None:
    with served(3, endpoint) as store, peer(endpoint, TierStats()) as client:
        num_others = store.max_pages - 3
        others = [BlockHash(i.to_bytes(32)) for i in range(2 * num_others + 1)]
        for name in others[:num_others]:
            store.put(name, LAYOUT.new_page())
        assert client.num_leading(NAMES) == 3
        for name in others[num_others:]:
            store.put(name, LAYOUT.new_page())
        assert client.num_leading(NAMES) == 2


def test_request_waits_for_a_page_on_its_way_from_the_device(endpoint: str) -> None:
    coming = threading.Event()

    def is_coming(block_hash: BlockHash) -> bool:
        if block_hash == NAMES[2] and not coming.is_set():
            coming.set()
            threading.Timer(0, lambda: store.put(NAMES[2], LAYOUT.new_page())).start()
        return block_hash == NAMES[2]

    with served(2, endpoint, is_coming=is_coming) as store, peer(endpoint, TierStats()) as client:
        assert client.num_leading(NAMES) == 3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"layout": dataclasses.replace(LAYOUT, model="fine-tuned")}, "peer_layout"),
        ({"token": "wrong", "timeout_s": 0.1}, "peer_timeout"),
    ],
)
def test_other_layout_or_token_gets_no_page(endpoint: str, options: dict[str, object], reason: str) -> None:
    stats = TierStats()
    with served(3, endpoint), peer(endpoint, stats, **options) as store:  # type: ignore[arg-type]
        assert store.get(NAMES, [LAYOUT.new_page() for _ in NAMES]) == 0
    assert stats.take().failures == {reason: 1}


def test_an_address_on_which_no_process_listens_costs_no_wait(endpoint: str) -> None:
    stats = TierStats()
    with peer(endpoint, stats, timeout_s=3600.0) as store:
        assert store.num_leading(NAMES) == 0
    assert stats.take().failures == {"peer_error": 1}


def test_dead_peer_is_asked_again_after_a_pause_that_doubles(endpoint: str) -> None:
    stats, now = TierStats(), [0.0]
    with peer(endpoint, stats, timeout_s=0.01, clock=lambda: now[0]) as store:
        failures = []
        for now[0] in (0.0, 0.5, 1.5, 3.0, 4.0):
            assert store.num_leading(NAMES) == 0
            failures.append(stats.take().failures.total())
        assert failures == [1, 0, 1, 0, 1]
        store._timeout_s = 10.0
        now[0] = 60.0
        with served(2, endpoint):
            assert store.num_leading(NAMES) == 2


NULL_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
"""The first bytes of a ZeroMQ peer that does not authenticate itself."""


def is_closed(connection: socket.socket) -> bool:
    """Send a greeting without authentication, and return True once the other side closes the connection."""
    with connection:
        connection.settimeout(30)
        connection.sendall(NULL_GREETING)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass
    return True


def test_server_takes_no_frame_of_a_client_without_the_token(endpoint: str) -> None:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with served(3, endpoint):
        assert is_closed(socket.create_connection((host, int(port))))


def test_client_takes_no_frame_of_a_server_without_the_token(endpoint: str) -> None:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_server((host, int(port))) as listener, peer(endpoint, TierStats(), timeout_s=60.0) as store:
        asking = threading.Thread(target=store.num_leading, args=(NAMES,))
        asking.start()
        with listener.accept()[0] as probe:
            assert probe.recv(1) == b"", "it only looks if a process listens"
        assert is_closed(listener.accept()[0])
        store._peers[0].closed.set()
        asking.join()


def test_a_host_that_takes_no_connection_ends_the_wait_in_time_and_is_connected_to_anew(endpoint: str) -> None:
    """A host that is down answers no packet. What its connection ends with later is of no interest to the next request."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    now, stats = [0.0], TierStats()
    with peer(endpoint, stats, timeout_s=0.05, clock=lambda: now[0]) as store:
        with socket.create_server((host, int(port)), backlog=0), contextlib.ExitStack() as connections:
            for _ in range(2):  # Linux drops what the queue of a listener does not hold
                one = connections.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex((host, int(port)))
            assert store.num_leading(NAMES) == 0
            assert stats.take().failures == {"peer_timeout": 1}
        with served(2, endpoint):
            store._timeout_s, now[0] = 10.0, 60.0
            assert store.num_leading(NAMES) == 2


def test_peers_are_asked_at_once_and_the_one_that_has_most_gives_the_pages(caplog: pytest.LogCaptureFixture) -> None:
    """The first one is frozen. It is waited for, but not as long as a fetch may take: the pages of others still come in time."""
    entries, stats = [f"127.0.0.1:{free_port()}" for _ in range(4)], TierStats()
    with contextlib.ExitStack() as stack:
        stack.enter_context(socket.create_server(("127.0.0.1", int(entries[0].rpartition(":")[2]))))
        for entry, num_pages in zip(entries[1:], (0, 4, 2), strict=True):
            stack.enter_context(served(num_pages, f"tcp://{entry}"))
        peers = stack.enter_context(contextlib.closing(Peers(LAYOUT, entries, TOKEN, 0.8, stats)))
        (store,) = peers.stores()
        assert store.num_leading(NAMES) == 4
        assert stats.take().failures == {"peer_timeout": 1}
        assert "no reply in 0.5 seconds" in caplog.text
        for one in (store._peers[1], store._peers[3]):
            one.closed.set()
        pages = [LAYOUT.new_page() for _ in NAMES]
        assert store.get(NAMES, pages) == 4
        assert b"".join(block.tobytes() for block in pages[3]) == bytes(range(3, 35))


def test_peers_may_wait_for_pages_half_of_the_time_of_a_fetch(endpoint: str) -> None:
    requests = list[PageRequest]()

    def answer(request: PageRequest) -> list[bytes]:
        requests.append(request)
        return reply(request)

    entry = endpoint.removeprefix("tcp://")
    with answering(endpoint, answer), contextlib.closing(Peers(LAYOUT, [entry], TOKEN, 8.0, TierStats())) as peers:
        (store,) = peers.stores()
        assert store.num_leading(NAMES) == 0
    assert [request.wait_s for request in requests] == [4.0]


def test_a_peer_that_has_all_pages_is_enough() -> None:
    """The wait for a frozen peer ends: it has not failed."""
    ports, stats = [free_port() for _ in range(2)], TierStats()
    with contextlib.ExitStack() as stack:
        frozen = stack.enter_context(socket.create_server(("127.0.0.1", ports[0])))
        stack.enter_context(served(6, f"tcp://127.0.0.1:{ports[1]}"))
        context = stack.enter_context(zmq.Context())
        peers = [Peer(LAYOUT, f"tcp://127.0.0.1:{port}", TOKEN, 3600.0, stats, context) for port in ports]
        for one in peers:
            stack.enter_context(contextlib.closing(one))
        for _ in range(2):
            assert PeerStore(LAYOUT, peers, 3600.0).num_leading(NAMES) == 6
        assert stats.take().failures == {}
        frozen.accept()[0].close()


def test_a_page_that_its_peer_has_lost_comes_from_another_one() -> None:
    stats, endpoints = TierStats(), [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(served(number, one)) for number, one in zip((6, 5), endpoints, strict=True)]
        context = stack.enter_context(zmq.Context())
        peers = [Peer(LAYOUT, one, TOKEN, 10.0, stats, context) for one in endpoints]
        for one in peers:
            stack.enter_context(contextlib.closing(one))
        store = PeerStore(LAYOUT, peers, 10.0)
        assert store.num_leading(NAMES) == 6
        stores[0].clear()
        assert store.get(NAMES, [LAYOUT.new_page() for _ in NAMES]) == 5


def test_a_peer_that_another_fetch_waits_for_is_asked_last(endpoint: str) -> None:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    other, stats = f"tcp://127.0.0.1:{free_port()}", TierStats()
    with served(6, other), socket.create_server((host, int(port))) as frozen, contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        peers = [Peer(LAYOUT, one, TOKEN, 3600.0, stats, context) for one in (endpoint, other)]
        for one in peers:
            stack.enter_context(contextlib.closing(one))
        asking = threading.Thread(target=PeerStore(LAYOUT, peers[:1], 3600.0).num_leading, args=(NAMES,))
        asking.start()
        stack.enter_context(frozen.accept()[0])
        assert PeerStore(LAYOUT, peers, 3600.0).num_leading(NAMES) == 6
        assert peers[0].lock.locked()
        peers[0].closed.set()
        asking.join()
    assert stats.take().failures == {}


@contextmanager
def answering(endpoint: str, answer: Callable[[PageRequest], list[bytes]]) -> Iterator[None]:
    """Run a peer that sends what `answer` returns to its first request."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    secure_server(router, TOKEN)
    router.bind(endpoint)

    def serve() -> None:
        client, *frames = router.recv_multipart()
        router.send_multipart([client, *answer(open_request(frames))])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        router.close()
        context.term()


GOOD = bytes(range(32))


def reply(request: PageRequest, *pages: bytes) -> list[bytes]:
    return [header_of(PageReply(request.nonce, len(pages))), *pages]


@pytest.mark.parametrize(
    ("answer", "count", "reason"),
    [
        (lambda request: reply(request, GOOD, GOOD[:-1]), 1, "peer_error"),
        (lambda request: reply(request, GOOD)[:1], 0, None),
        (lambda request: [b"junk", b"junk"], 0, "peer_error"),
        (lambda request: [b"junk"], 0, "peer_error"),
        (lambda request: [header_of(PageReply(request.nonce, -1)), GOOD], 0, "peer_error"),
        (lambda request: reply(PageRequest(b"another request", "", [], 1), GOOD), 0, "peer_timeout"),
    ],
)
def test_wrong_replies_are_not_used(
    endpoint: str, answer: Callable[[PageRequest], list[bytes]], count: int, reason: str | None
) -> None:
    stats = TierStats()
    timeout_s = 0.3 if reason == "peer_timeout" else 10.0
    with answering(endpoint, answer), peer(endpoint, stats, timeout_s=timeout_s) as store:
        assert store.get(NAMES, [LAYOUT.new_page() for _ in NAMES]) == count
    assert stats.take().failures == ({reason: 1} if reason else {})


def test_requests_have_limits() -> None:
    many = PageRequest(b"n", LAYOUT.identity, [bytes(32)] * (MAX_HASHES + 1), 1)
    with pytest.raises(WireError, match="a request for 4097 pages, 4096 are allowed"):
        open_request([header_of(many)])
    with pytest.raises(WireError, match="a request of 2 frames"):
        open_request([header_of(many), b""])


def test_messages_whose_text_is_not_utf_8_are_no_messages() -> None:
    request = header_of(PageRequest(b"n", "identity", [bytes(32)], 1)).replace(b"identity", b"\xffdentity")
    with pytest.raises(WireError, match="no request"):
        open_request([request])
    with pytest.raises(WireError, match="no reply"):
        open_reply(header_of(PageReply(b"n", 1)).replace(b"PageReply", b"\xffageReply"))


@pytest.mark.parametrize(
    ("address", "token", "problem"),
    [
        ("8.8.8.8:7000", TOKEN, r"8\.8\.8\.8 is no loopback or private address"),
        ("0.0.0.0:7000", TOKEN, r"0\.0\.0\.0 is no loopback or private address"),
        ("10.1.2.3:7000", None, "an address beyond this host needs --kv-peer-token"),
        ("10.1.2.3", TOKEN, "expected HOST:PORT"),
        ("10.1.2.3:70000", TOKEN, "expected HOST:PORT"),
    ],
)
def test_addresses_outside_of_private_networks_are_refused(address: str, token: str | None, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"--kv-listen '{address}': {problem}"):
        endpoint_of(address, "--kv-listen", token)


def test_private_addresses_are_accepted() -> None:
    assert endpoint_of("10.1.2.3:7000", "--kv-peers", TOKEN) == "tcp://10.1.2.3:7000"
    assert endpoint_of("100.64.0.1:7000", "--kv-peers", TOKEN) == "tcp://100.64.0.1:7000"
    assert endpoint_of("127.0.0.1:7000", "--kv-peers", None) == "tcp://127.0.0.1:7000"
    assert endpoint_of("[::1]:7000", "--kv-peers", None) == "tcp://[::1]:7000"


def test_address_in_use_is_one_line(endpoint: str) -> None:
    with (
        served(1, endpoint),
        pytest.raises(ConfigError, match=r"--kv-listen 127\.0\.0\.1:[0-9]+: Address already in use$"),
    ):
        PageServer(LAYOUT, [], lambda _: False, endpoint, TOKEN)


def test_decode_engine_continues_what_a_prefill_engine_computed() -> None:
    address = f"127.0.0.1:{free_port()}"
    prefill = Rig(tiers=TierConfig(kv_offload_memory=1 << 20, kv_listen=address))
    decode = Rig(tiers=TierConfig(kv_peers=address, kv_fetch="always", kv_fetch_timeout=60.0))
    assert prefill.tiers is not None
    assert decode.tiers is not None
    prefill.run(add("prompt", prompt(30), max_tokens=1))
    message = add("reply", prompt(30), max_tokens=9)
    assert decode.run(message)["reply"] == expected(message)
    assert decode.ends["reply"].num_cached_tokens == 28
    assert decode.scheduler.take_stats().kv_tier_fetched_pages == {"peer": 7}

    decode.run(add("salted", prompt(30), max_tokens=1, salt="other"))
    assert decode.ends["salted"].num_cached_tokens == 0
    prefill.tiers.close()
    late = add("late", prompt(40, first=9), max_tokens=3)  # the peer is gone
    decode.tiers.fetcher._timeout_s = 0.05
    assert decode.run(late)["late"] == expected(late)
    assert decode.scheduler.take_stats().kv_tier_failures["timeout"] == 1
    decode.tiers.close()


def test_peer_pages_are_kept_in_host_memory() -> None:
    address = f"127.0.0.1:{free_port()}"
    prefill = Rig(tiers=TierConfig(kv_offload_memory=1 << 20, kv_listen=address))
    decode = Rig(
        tiers=TierConfig(kv_offload_memory=1 << 20, kv_peers=address, kv_fetch="always", kv_fetch_timeout=60.0)
    )
    assert prefill.tiers is not None
    assert decode.tiers is not None
    prefill.run(add("prompt", prompt(30), max_tokens=1))
    for tier in ("peer", "host"):
        decode.run(add(tier, prompt(30), max_tokens=1))
        assert decode.scheduler.take_stats().kv_tier_fetched_pages == {tier: 7}
        decode.tiers.saver.settle()
        decode.kv.reset_prefix_cache()
    prefill.tiers.close()
    decode.tiers.close()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kv_listen": "127.0.0.1:7000"}, "--kv-listen needs --kv-offload-memory or --kv-offload-dir"),
        ({"kv_peers": "8.8.8.8:7000", "kv_peer_token": "x"}, "no loopback or private address"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Rig(tiers=TierConfig(**settings))  # type: ignore[arg-type]


def test_peers_need_the_prefix_cache() -> None:
    cache = CacheConfig(enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="--kv-peers: needs --enable-prefix-caching"):
        Config(model=ModelConfig(model="m"), cache=cache, tiers=TierConfig(kv_peers="127.0.0.1:7000"))
