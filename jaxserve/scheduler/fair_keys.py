"""Orders the requests of several API keys so that each key gets its share: start-time fair queueing.

Each request gets a start tag when it arrives: the end of its key's last request, or the virtual time if that is later. The
end is the start plus the tokens that the request is expected to cost; the virtual time is the tag of the request whose turn
is next. Requests go in order of their tags, so keys that have requests waiting take turns by tokens, and one that has asked
for little goes first. Tags of one key grow, so its requests keep their order of arrival. While nothing waits, no key owes
anything. All this holds within a priority: each has its own virtual time, and its own ends.

A request that ends before it has started costs nothing: the later ones of its key that have not started move up by its cost.

One key cannot hold every row of a step: the last one stays free once a second key is known, so that a request of another key
starts at once.

Source: Goyal, Vin and Cheng, "Start-time Fair Queueing" (SIGCOMM 1996).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, Protocol, TypeVar

from jaxserve.ipc.messages import AddRequest

Rank = tuple[int, int, int]
"""Priority, start tag, order of arrival: the lowest goes first. Unique."""

by_rank: Final = attrgetter("rank")
"""Sort key of the waiting and of the running requests."""

_FIRST_OUTPUT: Final = 128
"""Output tokens that a key's requests are expected to have before one has ended."""
_WEIGHT: Final = 0.1
"""Weight of the last request in a key's mean number of output tokens."""
_LEAST_ROWS: Final = 8
"""Rows of a step from which on the last one is kept for other keys."""


class KeyedRequest(Protocol):
    """A request of an API key."""

    rank: Rank
    """Changes only while the request has not started."""

    @property
    def key_name(self) -> str:
        """Name of its API key; empty: the key has none, or there is none."""
        ...

    @property
    def queue_seconds(self) -> float | None:
        """Time from arrival to the first start; None until then."""
        ...


K = TypeVar("K", bound=KeyedRequest)


@dataclass(slots=True)
class _Turns:
    """The turns of the keys at one priority."""

    now: int = 0
    """The virtual time."""
    ends: dict[str, int] = field(default_factory=dict)
    """End tag of each key's last request."""
    costs: dict[int, int] = field(default_factory=dict)
    """Expected tokens of each request that has not ended, by its order of arrival."""


class FairKeys:
    """Ranks of requests, by key."""

    def __init__(self) -> None:
        self._turns: dict[int, _Turns] = {}
        """By priority, as long as a request of that priority has not ended."""
        self._names: set[str] = set()
        """All keys that have sent a request."""
        self._outputs: dict[str, float] = {}
        """Mean number of output tokens of each key's requests."""
        self._gaps: list[tuple[int, int, str, int]] = []
        """Order of arrival, priority, key and cost of requests that ended before they started, since the last `close_gaps`."""

    def rank(self, message: AddRequest, arrival: int, waiting: Sequence[KeyedRequest]) -> Rank:
        """Return the rank of a request that arrives now. Call `close_gaps` before. waiting: requests in order of rank."""
        name, priority = message.key_name, message.priority
        self._names.add(name)
        turns = self._turns.setdefault(priority, _Turns())
        place = bisect_left(waiting, (priority, 0, 0), key=by_rank)
        has_next = place < len(waiting) and waiting[place].rank[0] == priority
        turns.now = max(turns.now, waiting[place].rank[1] if has_next else max(turns.ends.values(), default=0))
        start = max(turns.now, turns.ends.get(name, 0))
        num_output = min(message.sampling.max_tokens, int(self._outputs.get(name, _FIRST_OUTPUT)))
        cost = max(1, len(message.prompt_token_ids) + num_output)
        turns.ends[name] = start + cost
        turns.costs[arrival] = cost
        return priority, start, arrival

    def end(self, request: KeyedRequest, num_output: int) -> None:
        """Note that a request has ended, with so many output tokens."""
        priority, _, arrival = request.rank
        turns, name = self._turns[priority], request.key_name
        cost = turns.costs.pop(arrival)
        if request.queue_seconds is None:
            turns.ends[name] -= cost
            self._gaps.append((arrival, priority, name, cost))
        else:
            mean = self._outputs.get(name, float(num_output))
            self._outputs[name] = mean + _WEIGHT * (num_output - mean)
        if not turns.costs:
            del self._turns[priority]

    def close_gaps(self, requests: Iterable[K], waiting: list[K]) -> None:
        """Move requests that have not started up by the cost of those before them that ended without a start.

        requests: all that have not ended, in order of arrival. waiting: sorted again by rank.
        """
        if not self._gaps:
            return
        gaps, self._gaps = sorted(self._gaps, reverse=True), []
        freed: defaultdict[tuple[int, str], int] = defaultdict(int)
        for request in requests:
            priority, tag, arrival = request.rank
            while gaps and gaps[-1][0] < arrival:
                _, of_priority, name, cost = gaps.pop()
                freed[of_priority, name] += cost
            if request.queue_seconds is None:
                request.rank = priority, tag - freed[priority, request.key_name], arrival
        waiting.sort(key=by_rank)

    def keeps_row(self, request: KeyedRequest, running: Sequence[KeyedRequest], max_rows: int) -> bool:
        """Return True if `request` may not have the only row that is left, since its key has all the others."""
        if len(self._names) < 2 or max_rows < _LEAST_ROWS or len(running) < max_rows - 1:
            return False
        return all(other.key_name == request.key_name for other in running)
