"""Waiting requests whose prefix is fetched from a tier: they wait beside the queue, and hold up no other request."""

from __future__ import annotations

import math
from typing import Final

from jaxserve.ipc.stats import EngineStats
from jaxserve.kv.manager import KVManager
from jaxserve.kv.tiers.tiers import KVTiers
from jaxserve.scheduler.base import discard
from jaxserve.scheduler.budget import ShortestFirst
from jaxserve.scheduler.request import Request
from jaxserve.types import RequestId

_IDLE_WAIT_S: Final = 0.005
"""The wait for pages if there is nothing else to do; then the engine looks for messages."""
_LOOK_AHEAD: Final = 8
"""Waiting requests that a step considers for a fetch, of those first in rank and of the shortest ones."""


class Prefetch:
    """The policy of fetches. Without tiers it does nothing."""

    def __init__(self, kv: KVManager, tiers: KVTiers | None) -> None:
        self._kv = kv
        self._tiers = tiers
        self._requests: dict[RequestId, Request] = {}
        """The requests that wait for pages."""
        self._refused: dict[RequestId, float] = {}
        """The waiting requests for which nothing was to be fetched, the one that was looked up longest ago first, and the free pages
        and slots above which there may be something."""

    def begin(self, waiting: list[Request], shortest_first: ShortestFirst | None, num_running: int) -> None:
        """Take requests that may start next and whose pages are worth a fetch from the queue, until `poll` returns them.

        A look-up costs more the longer a prompt is: one request that was refused is looked up again by a call.
        """
        if self._tiers is None or not waiting:
            return
        next_ones = dict.fromkeys(waiting[:_LOOK_AHEAD])
        if shortest_first is not None:
            next_ones |= dict.fromkeys(request for _, request in shortest_first.first(_LOOK_AHEAD))
        names = {request.request_id for request in next_ones}
        turn = next((key for key in self._refused if key in names), None)
        num_free = self._kv.pool.num_free + sum(states.num_free for states in self._kv.groups.states)
        for request in next_ones:
            key = request.request_id
            if request.num_unscored or (key != turn and num_free <= self._refused.get(key, -1)):
                continue
            self._refused.pop(key, None)
            missing = self._kv.missing_prefix(
                request.table,
                request.tokens,
                num_spare_blocks=num_running,
                num_awaited=self._tiers.fetcher.num_awaited,
            )
            if missing is None:
                self._refused[key] = num_free
                continue
            is_fetched = self._tiers.fetcher.begin(key, missing)
            request.table.num_found = max(request.table.num_found, missing.num_found)
            if not is_fetched:
                self._refused[key] = math.inf
            else:
                self._requests[key] = request
                discard(waiting, request)
                if shortest_first is not None:
                    shortest_first.remove(request)

    def poll(self, *, is_idle: bool) -> list[Request]:
        """Return the requests whose fetch has ended; they start with what it has brought. Waits a little if idle."""
        if self._tiers is None or not self._requests:
            return []
        ended = self._tiers.fetcher.poll(_IDLE_WAIT_S if is_idle else 0.0)
        return [self._requests.pop(key) for key in ended]

    def forget(self, request: Request) -> None:
        """Count `request` as started or ended."""
        if self._tiers is not None:
            self._tiers.fetcher.forget(request.request_id)
            self._requests.pop(request.request_id, None)
            self._refused.pop(request.request_id, None)

    def clear_tiers(self) -> None:
        if self._tiers is not None:
            self._tiers.clear()

    def leave_device(self) -> None:
        """Drop work on pages of the device, and end all fetches: its pages are given up."""
        if self._tiers is not None:
            self._tiers.fetcher.give_up()
            self._tiers.lose_device()

    def lose_device(self) -> None:
        """Drop work on pages of the device, which has lost them."""
        if self._tiers is not None:
            self._tiers.lose_device()

    def add_stats(self, stats: EngineStats) -> None:
        """Add what the tiers have counted since the last call."""
        if self._tiers is None:
            return
        counts = self._tiers.stats.take()
        stats.kv_tier_stored_pages = dict(counts.stored_pages)
        stats.kv_tier_fetched_pages = dict(counts.fetched_pages)
        stats.kv_tier_evicted_pages = dict(counts.evicted_pages)
        stats.kv_tier_snapshots = dict(counts.snapshots)
        stats.kv_tier_bytes = dict(counts.bytes_moved)
        stats.kv_tier_failures = dict(counts.failures)
        stats.kv_fetch_seconds = counts.fetch_seconds
        stats.kv_fetches_skipped = counts.num_skipped
