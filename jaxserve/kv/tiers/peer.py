"""Pages of other engines, fetched over the network.

`Peers` follows the addresses of `--kv-peers`; `PeerStore` is all peers as one store, for one fetch; `Peer` is one connection.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final, NamedTuple

import numpy as np
import zmq

from jaxserve.errors import ConfigError
from jaxserve.kv.tiers.page import Page, PageLayout, copy_page
from jaxserve.kv.tiers.stats import TierStats
from jaxserve.kv.tiers.wire import (
    CURVE_BYTES,
    MAX_HASHES,
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    PageRefusal,
    PageRequest,
    UnresolvedError,
    WireError,
    begin_probe,
    check_probe,
    endpoints_of,
    header_of,
    is_address,
    open_reply,
    secure_client,
)
from jaxserve.types import BlockHash

_log = logging.getLogger(__name__)

_FLAG: Final = "--kv-peers"
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
_NONCE_BYTES: Final = 16
_REPLY_SHARE: Final = 0.625
"""Part of `--kv-fetch-timeout` that a reply may take. The rest is for another peer, if this one does not answer."""
_WAIT_SHARE: Final = 0.8
"""Part of that time for which a peer may wait for pages that are on their way from its device."""
_MAX_UNSENT: Final = 16
"""Requests that wait for a peer that does not read; with more of them it has failed."""
_POLL_MS: Final = 10
"""Time after which a wait looks whether it was ended."""
_RESOLVE_S: Final = 10.0
"""Time after which a name is resolved again."""
_START_S: Final = 5.0
"""Longest wait for the first addresses of names. A resolver may take a minute."""


class Answer(NamedTuple):
    """A peer's reply."""

    found: int
    """PageReply.count"""
    frames: list[Any]
    """The bytes of each page."""


class Peer:
    """One peer. One request at a time: but `close`, every call needs `lock`. One that fails is not asked again for a while."""

    def __init__(
        self,
        layout: PageLayout,
        endpoint: str,
        token: str,
        timeout_s: float,
        stats: TierStats,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s`: longest wait for a reply. Connecting waits for the first request."""
        self.endpoint = endpoint
        self.lock = threading.Lock()
        self.closed = threading.Event()
        self._timeout_s = timeout_s
        self._layout = layout
        self._token = token
        self._stats = stats
        self._context = context
        self._clock = clock
        self._asked: tuple[bytes, bytes] | None = None
        """The request whose answer is awaited, and its nonce."""
        self._probe: socket.socket | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._pause_s = 0.0
        self._retry_s = 0.0
        """Time from which the peer is asked again after a failure."""

    @property
    def awaited(self) -> tuple[Any, int] | None:
        """The object to poll, and the event, before `advance`; None if no answer is to come."""
        if self._asked is None or self.closed.is_set():
            return None
        return (self._socket, zmq.POLLIN) if self._probe is None else (self._probe.fileno(), zmq.POLLOUT)

    def begin(self, header: bytes, nonce: bytes) -> None:
        """Send a request, or begin to connect, unless the peer has failed shortly before."""
        if self.closed.is_set() or self._clock() < self._retry_s:
            return
        self._asked = header, nonce
        try:
            if self._socket is None:
                self._probe = begin_probe(self.endpoint)
            else:
                self._socket.send(header, zmq.NOBLOCK)
        except (WireError, zmq.ZMQError) as error:
            self.fail("peer_error", str(error))

    def advance(self) -> Answer | None:
        """Do what the awaited event allows: send the request once connected, or return the answer. Drops answers to earlier requests."""
        assert self._asked is not None, "a peer that was asked"
        header, nonce = self._asked
        try:
            if self._socket is None:
                assert self._probe is not None, "a peer that was asked"
                check_probe(self._probe)
                self._probe.close()
                self._probe, self._socket = None, self._connect()
                self._socket.send(header, zmq.NOBLOCK)
                return None
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            reply = open_reply(frames[0].bytes)
        except (WireError, zmq.ZMQError) as error:
            self.fail("peer_error", str(error))
            return None
        if reply.nonce != nonce:
            return None
        if isinstance(reply, PageRefusal):
            self.fail("peer_layout", "they have another layout", _LONGEST_PAUSE_S)
            return None
        self._asked, self._pause_s = None, 0.0
        return Answer(reply.count, [frame.buffer for frame in frames[1:]])

    def end(self, *, is_late: bool) -> None:
        """Await no answer any more. `is_late`: the peer should have given one."""
        if is_late and self.awaited is not None:
            text = "the peer is gone or slow, or has another --kv-peer-token"
            self.fail("peer_timeout", f"no reply in {self._timeout_s:g} seconds: {text}")
        self._asked = None
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def fail(self, reason: str, text: str, pause_s: float = 0.0) -> None:
        """Count a failure, and ask the peer again after a pause that doubles."""
        self._stats.failed(reason)
        self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
        pause_s = max(pause_s, self._pause_s)
        self._retry_s = self._clock() + pause_s
        self._disconnect()
        _log.warning("KV pages of %s: %s; it is asked again in %g s", self.endpoint, text, pause_s)

    def close(self) -> None:
        self.closed.set()
        with self.lock:
            self._disconnect()

    def _connect(self) -> zmq.Socket[bytes]:
        connection = self._context.socket(zmq.DEALER)
        connection.setsockopt(zmq.LINGER, 0)
        connection.setsockopt(zmq.SNDHWM, _MAX_UNSENT)
        connection.setsockopt(zmq.IPV6, int("[" in self.endpoint))
        longest = max(MAX_REQUEST_BYTES, *(each.num_bytes for each in self._layout.all))
        connection.setsockopt(zmq.MAXMSGSIZE, longest + CURVE_BYTES)
        secure_client(connection, self._token)
        connection.connect(self.endpoint)
        return connection

    def _disconnect(self) -> None:
        self.end(is_late=False)
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class PeerStore:
    """Several peers as one store, for one fetch: they are asked at once, and pages come from one that has them."""

    tier = "peer"

    def __init__(self, layout: PageLayout, peers: Sequence[Peer], timeout_s: float) -> None:
        self._layout = layout
        self._peers = peers
        self._timeout_s = timeout_s
        self._holders: dict[BlockHash, Peer] = {}
        """A peer that had what has this name, when it was asked."""

    def num_leading(self, names: Sequence[BlockHash]) -> int:
        """Ask all peers, until one has everything. Returns 0 if none answers."""
        return self._find(self._peers, names)

    def find_first(self, names: Sequence[BlockHash]) -> int | None:
        """Ask all peers, until one has the first. Returns None if none has any, or answers."""
        answers = self._ask(self._peers, names, lambda answer: answer.found == 0, finds_first=True)
        found = [(answer.found, peer) for peer, answer in answers if answer.found < min(len(names), MAX_HASHES)]
        if not found:
            return None
        index, peer = min(found, key=lambda one: one[0])
        self._holders[names[index]] = peer
        return index

    def get(self, names: Sequence[BlockHash], pages: Sequence[Page]) -> int:
        """Get leading pages of the peer that had the first; asks the others if it does not give it."""
        peer = self._holders.pop(names[0], self._peers[0] if len(self._peers) == 1 else None)
        count = 0 if peer is None else self._get(peer, names, pages)
        if not count and self._find([one for one in self._peers if one is not peer], names):
            count = self._get(self._holders.pop(names[0]), names, pages)
        return count

    def _find(self, peers: Sequence[Peer], names: Sequence[BlockHash]) -> int:
        """Return how many leading pages one of these peers has, and note which."""
        wanted = min(len(names), MAX_HASHES)
        answers = self._ask(peers, names, lambda answer: answer.found >= wanted)
        if not answers:
            return 0
        peer, answer = max(answers, key=lambda one: one[1].found)
        self._holders |= dict.fromkeys(names[: answer.found], peer)
        return min(answer.found, wanted)

    def _get(self, peer: Peer, names: Sequence[BlockHash], pages: Sequence[Page]) -> int:
        most = min(len(names), max(1, MAX_REPLY_BYTES // self._layout.of(names[0]).num_bytes))
        frames = [frame for _, answer in self._ask([peer], names[:most], max_pages=most) for frame in answer.frames]
        for count, (frame, name, page) in enumerate(zip(frames, names, pages, strict=False)):
            row, layout = np.frombuffer(frame, np.uint8), self._layout.of(name)
            if len(row) != layout.num_bytes:
                with peer.lock:
                    peer.fail("peer_error", f"a page of {len(row)} bytes")
                return count
            copy_page(layout.views(row), page)
        return min(len(frames), len(pages))

    def _ask(
        self,
        peers: Sequence[Peer],
        names: Sequence[BlockHash],
        is_enough: Callable[[Answer], bool] = lambda _: True,
        *,
        max_pages: int = 0,
        finds_first: bool = False,
    ) -> list[tuple[Peer, Answer]]:
        """Ask peers at once, until an answer is enough; returns the answers, the first that came first.

        A peer that another fetch asks now is asked after the others.
        """
        nonce, identity = secrets.token_bytes(_NONCE_BYTES), self._layout.identity
        wait_s = _WAIT_SHARE * self._timeout_s
        request = PageRequest(nonce, identity, list(names[:MAX_HASHES]), max_pages, wait_s, finds_first)
        deadline_s = time.monotonic() + self._timeout_s
        answers = list[tuple[Peer, Answer]]()
        waiting = list(peers)
        while waiting and not any(is_enough(answer) for _, answer in answers):
            locked = [peer for peer in waiting if peer.lock.acquire(blocking=False)]
            if not locked:
                if not waiting[0].lock.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
                    break
                locked = waiting[:1]
            answers += _exchange(locked, request, self._timeout_s, is_enough)
            waiting = [peer for peer in waiting if peer not in locked]
        return answers


def _exchange(
    peers: Sequence[Peer], request: PageRequest, timeout_s: float, is_enough: Callable[[Answer], bool]
) -> list[tuple[Peer, Answer]]:
    """Send a request to peers, and return their answers up to the first that is enough. Releases the lock of each peer."""
    header, answers, held, is_late = header_of(request), list[tuple[Peer, Answer]](), list(peers), False
    deadline_s = time.monotonic() + timeout_s
    try:
        for peer in peers:
            peer.begin(header, request.nonce)
        while not is_late and not any(is_enough(answer) for _, answer in answers):
            for peer in [peer for peer in held if peer.awaited is None]:
                held.remove(peer)
                peer.lock.release()
            awaited = [(event, peer) for peer in held if (event := peer.awaited) is not None]
            if not awaited:
                break
            peer_of = {pollable: peer for (pollable, _), peer in awaited}
            for pollable, _ in zmq.zmq_poll([event for event, _ in awaited], _POLL_MS):
                if (answer := peer_of[pollable].advance()) is not None:
                    answers.append((peer_of[pollable], answer))
            is_late = time.monotonic() >= deadline_s
    finally:
        for peer in held:
            peer.end(is_late=is_late)
            peer.lock.release()
    return answers


class Peers:
    """The peers of one engine. A name stands for all its addresses, and is resolved again and again, in a thread of its own."""

    def __init__(
        self,
        layout: PageLayout,
        entries: Sequence[str],
        token: str,
        timeout_s: float,
        stats: TierStats,
        *,
        own: str | None = None,
        resolve: Callable[[str], Iterable[str]] | None = None,
        period_s: float = _RESOLVE_S,
        start_s: float = _START_S,
    ) -> None:
        """`entries`: HOST:PORT each. `timeout_s`: longest time of a fetch without a page. `own`: the endpoint of this engine, which is
        left out. `start_s`: how long to wait for the first addresses of names. Raises ConfigError for an address that may not be used;
        a name may have one later."""
        self._layout = layout
        self._entries = entries
        self._token = token
        self._reply_s = _REPLY_SHARE * timeout_s
        self._stats = stats
        self._own = own
        self._resolve = resolve
        self._period_s = period_s
        names = [entry for entry in entries if not is_address(entry, _FLAG)]
        self._found = {entry: endpoints_of(entry, _FLAG, token) for entry in entries if entry not in names}
        """The endpoints of each entry that were found last."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None  # until there is a peer
        self._peers: tuple[Peer, ...] = ()
        self._change()
        first = {name: Future[ConfigError | None]() for name in names}
        for name, problem in first.items():
            threading.Thread(target=self._follow, args=(name, problem), name="kv-resolve", daemon=True).start()
        for problem in wait(first.values(), start_s).done:
            if (error := problem.result()) is not None and not isinstance(error, UnresolvedError):
                self.close()
                raise error

    def stores(self) -> list[PeerStore]:
        """Return the peers there are now as the store of one fetch; no store if there are none."""
        return [PeerStore(self._layout, peers, self._reply_s)] if (peers := self._peers) else []

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            for peer in self._peers:
                peer.closed.set()
            for peer in self._peers:
                peer.close()
            self._peers = ()
        if self._context is not None:
            self._context.term()

    def _follow(self, name: str, first: Future[ConfigError | None]) -> None:
        """Resolve a name until the end. An answer that fails, or is refused, changes no peers."""
        last_problem = ""
        while not self._closed.is_set():
            error: ConfigError | None = None
            try:
                endpoints = endpoints_of(name, _FLAG, self._token, self._resolve)
            except ConfigError as raised:
                error = raised
                if str(error) != last_problem:
                    _log.warning("%s", error)
                    if name in self._found or not isinstance(error, UnresolvedError):
                        self._stats.failed("peer_name")
            else:
                with self._lock:
                    self._found[name] = endpoints
                    self._change()
            last_problem = str(error or "")
            if not first.done():
                first.set_result(error)
            self._closed.wait(self._period_s)

    def _change(self) -> None:
        """Let the peers be those at the endpoints that were found. The caller holds the lock."""
        if self._closed.is_set():
            return
        found = dict.fromkeys(one for entry in self._entries for one in self._found.get(entry, ()) if one != self._own)
        known = {peer.endpoint: peer for peer in self._peers}
        self._peers = tuple(known.pop(one) if one in known else self._new_peer(one) for one in found)
        for peer in known.values():
            peer.close()

    def _new_peer(self, endpoint: str) -> Peer:
        self._context = self._context or zmq.Context()
        return Peer(self._layout, endpoint, self._token, self._reply_s, self._stats, self._context)
