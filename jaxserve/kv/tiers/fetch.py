"""One fetch, and the job that reads its pages, and then its snapshot, in a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from typing import Any, Final

from jaxserve.kv.prefix import MissingPrefix
from jaxserve.kv.restored import RestoredPages
from jaxserve.kv.tiers.device import PageDevice, StagedPages
from jaxserve.kv.tiers.fetch_plan import FetchPlan, plan_fetch
from jaxserve.kv.tiers.page import Page, snapshot_name
from jaxserve.kv.tiers.rule import FetchRule
from jaxserve.kv.tiers.snapshots import Snapshots
from jaxserve.kv.tiers.stats import TierStats
from jaxserve.kv.tiers.store import OwnStore, PageStore
from jaxserve.types import BlockHash, RequestId

_log = logging.getLogger(__name__)

_MAX_STAGED: Final = 2
"""Batches of one fetch that lie in a buffer of the device."""
_CANCEL_S: Final = 0.05
"""Time after which a job that waits for the engine's thread looks whether its fetch was given up."""


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """Pages, or a snapshot, that a job has staged."""

    names: Sequence[BlockHash]
    tiers: list[str]
    """The tier of each."""
    staged: StagedPages


@dataclass(slots=True, eq=False)
class Fetch:
    """A fetch of the missing pages, and the missing snapshot, of one prefix."""

    missing: MissingPrefix
    plan: FetchPlan | None
    """None: the job asks peers, and makes it."""
    peers: Sequence[PageStore]
    """Stores that the job may ask besides those of the engine."""
    restored: RestoredPages
    keys: list[RequestId]
    """The requests that wait for it."""
    begun_s: float
    progress_s: float
    """Time of the last batch."""
    batches: Queue[StagedBatch | None] = field(default_factory=lambda: Queue(_MAX_STAGED))
    """None after the last."""
    head: StagedBatch | None = None
    """The batch that was taken from the queue and is not ready yet."""
    given_up: threading.Event = field(default_factory=threading.Event)
    tiers: list[str] = field(default_factory=list)
    """The tier of each page that was restored, with a snapshot as its pages (`FetchPlan.costs`)."""

    @property
    def hashes(self) -> Sequence[BlockHash]:
        """All pages that the request could share."""
        return self.missing.hashes

    def drop_batches(self) -> None:
        """Free the buffers of batches that no one takes any more."""
        with contextlib.suppress(Empty):
            while True:
                self.batches.get_nowait()

    def brings(self, missing: MissingPrefix) -> bool:
        """Return True if another request, that misses this, should wait for this fetch."""
        if missing.rank != self.missing.rank or self.given_up.is_set():
            return False
        return missing.next_hash in self.hashes[min(self.restored.count, len(self.hashes) - 1) :]


class FetchJob:
    """Reads pages from the tiers and stages them on the device; any number of threads may run it."""

    def __init__(
        self,
        device: PageDevice[Any],
        stores: Sequence[OwnStore],
        rule: FetchRule,
        stats: TierStats,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._device = device
        self._snapshots = snapshots
        self._stores = stores
        self._rule = rule
        self._stats = stats
        self._progress = threading.Condition()
        self._keeping = threading.Lock()

    def wait(self, seconds: float) -> None:
        """Wait until a job has a batch or its end, at most so long."""
        with self._progress:
            self._progress.wait(seconds)

    def give_up(self, fetches: Sequence[Fetch]) -> None:
        """Let jobs end: from now on none of them puts a page into a store."""
        with self._keeping:
            for fetch in fetches:
                fetch.given_up.set()
        for fetch in fetches:
            fetch.drop_batches()

    def run(self, fetch: Fetch) -> None:
        """Stage what is missing, batch by batch."""
        try:
            self._stage(fetch)
        except Exception as error:  # whatever a tier or the device raises, the request computes its prompt
            _log.warning("KV pages were not fetched: %s", error)
            self._stats.failed("fetch")
        finally:
            self._hand_over(fetch, None)

    def _stage(self, fetch: Fetch) -> None:
        plan = fetch.plan
        if plan is None:
            plan = plan_fetch([*self._stores, *fetch.peers], fetch.missing)
            if plan is None:
                return
            if not self._rule.pays(plan.costs(self._device.layout), fetch.missing.num_saved(plan.end)):
                self._stats.skipped()
                return
        for device, names in self._batches(fetch, plan):
            pages = [self._device.layout.of(name).new_page() for name in names]
            tiers = self._read(fetch, names, pages)
            if fetch.given_up.is_set():
                return
            if tiers:
                staged = device.stage(pages[: len(tiers)], fetch.missing.rank)
                self._hand_over(fetch, StagedBatch(names[: len(tiers)], tiers, staged))
            if len(tiers) < len(names):
                return

    def _batches(self, fetch: Fetch, plan: FetchPlan) -> Iterator[tuple[PageDevice[Any], Sequence[BlockHash]]]:
        """Yield the names of a batch of pages at a time, then that of the snapshot, each with the device that stages it."""
        for start in range(fetch.missing.num_cached, plan.end, self._device.max_batch):
            yield self._device, fetch.hashes[start : min(plan.end, start + self._device.max_batch)]
        if plan.snapshot_tier is not None and self._snapshots is not None:
            yield self._snapshots.device, [snapshot_name(fetch.hashes[plan.end - 1])]

    def _read(self, fetch: Fetch, names: Sequence[BlockHash], pages: Sequence[Page]) -> list[str]:
        """Read pages up to the first that no tier has; returns the tier of each."""
        tiers: list[str] = []
        while len(tiers) < len(names) and not fetch.given_up.is_set():
            rest = slice(len(tiers), None)
            tier, count = self._get(fetch, names[rest], pages[rest])
            if not count:
                break
            tiers += [tier] * count
        return tiers

    def _get(self, fetch: Fetch, names: Sequence[BlockHash], pages: Sequence[Page]) -> tuple[str, int]:
        """Read the leading pages that one tier has, and give the stores above it a copy; returns tier and number."""
        for index, store in enumerate([*self._stores, *fetch.peers]):
            if count := store.get(names, pages):
                for name, page in zip(names[:count], pages, strict=False):
                    for faster in self._stores[:index]:
                        with self._keeping:
                            if not fetch.given_up.is_set():
                                faster.put(name, page)
                return store.tier, count
        return "", 0

    def _hand_over(self, fetch: Fetch, batch: StagedBatch | None) -> None:
        """Pass `batch` to the engine's thread; waits while it has enough, until the fetch is given up."""
        while not fetch.given_up.is_set():
            try:
                fetch.batches.put(batch, timeout=_CANCEL_S)
                break
            except Full:
                continue
        if fetch.given_up.is_set():
            fetch.drop_batches()
        with self._progress:
            self._progress.notify_all()
