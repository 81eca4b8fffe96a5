"""Counts of the tiers, from all of their threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from jaxserve.kv.tiers.page import is_snapshot
from jaxserve.types import BlockHash


@dataclass(slots=True)
class TierCounts:
    """Increments since the last report, by tier where they are Counters."""

    stored_pages: Counter[str] = field(default_factory=Counter)
    fetched_pages: Counter[str] = field(default_factory=Counter)
    """Pages that were restored to the device."""
    evicted_pages: Counter[str] = field(default_factory=Counter)
    snapshots: Counter[str] = field(default_factory=Counter)
    """Snapshots of recurrent states by tier and event: `host/stored`, `host/fetched`, `host/evicted`."""
    bytes_moved: Counter[str] = field(default_factory=Counter)
    """By tier and direction: `host/in`, `host/out`."""
    failures: Counter[str] = field(default_factory=Counter)
    """Fetches and saves that failed, by reason."""
    fetch_seconds: list[float] = field(default_factory=list)
    """Time from the begin of each fetch to its end."""
    num_skipped: int = 0
    """Prefixes that were computed because a fetch would have taken longer."""


class TierStats:
    """Collects counts until they are taken."""

    def __init__(self, *, keeps_lost: bool = False) -> None:
        """`keeps_lost`: keep the hashes of pages that a tier does not have any more for `take_lost`."""
        self._lost: list[BlockHash] | None = [] if keeps_lost else None
        self._lock = threading.Lock()
        self._counts = TierCounts()

    def stored(self, tier: str, name: BlockHash, num_bytes: int) -> None:
        """Count a page or a snapshot that a tier has got."""
        with self._lock:
            if is_snapshot(name):
                self._counts.snapshots[f"{tier}/stored"] += 1
            else:
                self._counts.stored_pages[tier] += 1
            self._counts.bytes_moved[f"{tier}/in"] += num_bytes

    def fetched(self, tier: str, names: Sequence[BlockHash], num_bytes: int) -> None:
        """Count pages and snapshots that came back to the device from one tier."""
        num_snapshots = sum(map(is_snapshot, names))
        with self._lock:
            if num_snapshots:
                self._counts.snapshots[f"{tier}/fetched"] += num_snapshots
            if num_snapshots < len(names):
                self._counts.fetched_pages[tier] += len(names) - num_snapshots
            self._counts.bytes_moved[f"{tier}/out"] += num_bytes

    def evicted(self, tier: str, name: BlockHash) -> None:
        """Count a page or a snapshot that a tier has dropped for others."""
        with self._lock:
            if is_snapshot(name):
                self._counts.snapshots[f"{tier}/evicted"] += 1
                return
            self._counts.evicted_pages[tier] += 1
        self.lost([name])

    def lost(self, names: Collection[BlockHash]) -> None:
        """Note pages that a tier, or the copies to all of them, may have dropped; they may be elsewhere."""
        if self._lost is not None:
            with self._lock:
                self._lost += [name for name in names if not is_snapshot(name)]

    def take_lost(self) -> list[BlockHash]:
        """Return the hashes of pages that were noted as lost since the last call."""
        with self._lock:
            lost, self._lost = self._lost or [], [] if self._lost is not None else None
        return lost

    def failed(self, reason: str, count: int = 1) -> None:
        with self._lock:
            self._counts.failures[reason] += count

    def took(self, seconds: float) -> None:
        """Count a fetch that ended."""
        with self._lock:
            self._counts.fetch_seconds.append(seconds)

    def skipped(self) -> None:
        """Count a prefix that was computed because a fetch would not have paid."""
        with self._lock:
            self._counts.num_skipped += 1

    def take(self) -> TierCounts:
        """Return the counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, TierCounts()
        return counts
