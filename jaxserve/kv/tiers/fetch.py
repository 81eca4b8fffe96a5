"""One fetch, and the job that reads its pages in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Full, Queue
from typing import Any, Final

from jaxserve.kv.tiers.device import PageDevice, StagedPages
from jaxserve.kv.tiers.page import Page
from jaxserve.kv.tiers.rule import FetchRule
from jaxserve.kv.tiers.stats import TierStats
from jaxserve.kv.tiers.store import PageStore, leading_tiers
from jaxserve.types import BlockHash, RequestId

_log = logging.getLogger(__name__)

_MAX_STAGED: Final = 2
"""Batches of one fetch that lie in a buffer of the device."""
_CANCEL_S: Final = 0.05
"""Time after which a job that waits for the engine's thread looks whether its fetch was given up."""


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """Pages that a job has staged, by tier."""

    tiers: list[str]
    staged: StagedPages


@dataclass(slots=True, eq=False)
class Fetch:
    """The missing pages of one prefix."""

    hashes: Sequence[BlockHash]
    num_restored: int
    """Leading pages that are in the prefix cache."""
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
    """The tier of each page that was restored."""


class FetchJob:
    """Reads pages from the tiers and stages them on the device; any number of threads may run it."""

    def __init__(
        self,
        device: PageDevice[Any],
        stores: Sequence[PageStore],
        peers: Sequence[PageStore],
        rule: FetchRule,
        stats: TierStats,
    ) -> None:
        self._device = device
        self._stores = stores
        self._peers = peers
        self._rule = rule
        self._stats = stats
        self._progress = threading.Condition()

    def wait(self, seconds: float) -> None:
        """Wait until a job has a batch or its end, at most so long."""
        with self._progress:
            self._progress.wait(seconds)

    def run(self, fetch: Fetch) -> None:
        """Stage the missing pages, batch by batch."""
        try:
            self._stage(fetch)
        except Exception as error:  # whatever a tier or the device raises, the request computes its prompt
            _log.warning("KV pages were not fetched: %s", error)
            self._stats.failed("fetch")
        finally:
            self._hand_over(fetch, None)

    def _stage(self, fetch: Fetch) -> None:
        missing = fetch.hashes[fetch.num_restored :]
        if self._peers:  # otherwise `begin` has asked
            tiers = leading_tiers([*self._stores, *self._peers], missing)
            if not self._rule.pays(tiers):
                if tiers:
                    self._stats.skipped()
                return
        for start in range(0, len(missing), self._device.max_batch):
            hashes = missing[start : start + self._device.max_batch]
            pages = [self._device.layout.new_page() for _ in hashes]
            tiers = self._read(fetch, hashes, pages)
            if fetch.given_up.is_set():
                return
            if tiers:
                self._hand_over(fetch, StagedBatch(tiers, self._device.stage(pages[: len(tiers)])))
            if len(tiers) < len(hashes):
                return

    def _read(self, fetch: Fetch, hashes: Sequence[BlockHash], pages: Sequence[Page]) -> list[str]:
        """Read pages up to the first that no tier has; returns the tier of each."""
        tiers: list[str] = []
        while len(tiers) < len(hashes) and not fetch.given_up.is_set():
            rest = slice(len(tiers), None)
            tier, count = self._get(hashes[rest], pages[rest])
            if not count:
                break
            tiers += [tier] * count
        return tiers

    def _get(self, hashes: Sequence[BlockHash], pages: Sequence[Page]) -> tuple[str, int]:
        """Read the leading pages that one tier has, and give the stores above it a copy; returns tier and number."""
        above: list[PageStore] = []
        for store in self._stores:
            if count := store.get(hashes, pages):
                break
            above.append(store)
        else:
            for store in self._peers:
                if count := store.get(hashes, pages):
                    break
            else:
                return "", 0
        for block_hash, page in zip(hashes[:count], pages, strict=False):
            for faster in above:
                faster.put(block_hash, page)
        return store.tier, count

    def _hand_over(self, fetch: Fetch, batch: StagedBatch | None) -> None:
        """Pass `batch` to the engine's thread; waits while it has enough, until the fetch is given up."""
        while not fetch.given_up.is_set():
            try:
                fetch.batches.put(batch, timeout=_CANCEL_S)
                break
            except Full:
                continue
        with self._progress:
            self._progress.notify_all()
