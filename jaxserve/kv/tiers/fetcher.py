"""Brings pages of a prefix, and the snapshot of recurrent states after them, from the tiers back to the device, while steps go on.

    begin     engine's thread   decide, and start a job
    job       own thread        read pages from the tiers, a batch at a time, and stage each batch on the device
    poll      engine's thread   for a batch that is staged: allocate pages, cache them under their hashes, and queue the write
    write     engine's thread   dispatch the queued writes; every step comes after them

A fetch holds no pages of the pool between these calls: what it restored is in the prefix cache and free, and when it
ends most recently used, as if a request had just left it. So a fetch never keeps a running request from its pages, and the
request that waited for the fetch starts like any other, with as many cached pages as there are. If anything fails, that is
fewer.

In a model with recurrent states a fetch ends at a snapshot, which comes last: it gets a slot, as the most recently used snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty
from typing import Any, Final

from jaxserve.kv.block_pool import BlockPool
from jaxserve.kv.prefix import MissingPrefix
from jaxserve.kv.restored import RestoredPages
from jaxserve.kv.tiers.device import PageDevice, StagedPages
from jaxserve.kv.tiers.fetch import Fetch, FetchJob, StagedBatch
from jaxserve.kv.tiers.fetch_plan import plan_fetch, snapshot_pages
from jaxserve.kv.tiers.page import hash_before, is_snapshot
from jaxserve.kv.tiers.rule import FetchRule
from jaxserve.kv.tiers.snapshots import Snapshots
from jaxserve.kv.tiers.stats import TierStats
from jaxserve.kv.tiers.store import OwnStore, PageStore
from jaxserve.types import BlockId, RequestId

_MAX_JOBS: Final = 4
"""Fetches that read at a time."""


class PageFetcher:
    """The fetches under way. All methods belong to the engine's thread."""

    def __init__(
        self,
        pool: BlockPool,
        device: PageDevice[Any],
        stores: Sequence[OwnStore],
        rule: FetchRule,
        stats: TierStats,
        *,
        peers: Callable[[], Sequence[PageStore]] = tuple,
        snapshots: Snapshots | None = None,
        timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`peers`: returns the stores there are now that a job has to ask what they have. `snapshots`: those of a model with recurrent
        states. `timeout_s`: longest time without a batch."""
        self._pool = pool
        self._device = device
        self._stores = stores
        self._peers = peers
        self._snapshots = snapshots
        self._rule = rule
        self._stats = stats
        self._timeout_s = timeout_s
        self._clock = clock
        self._fetches: list[Fetch] = []
        self._tried: dict[RequestId, tuple[int, int, int]] = {}
        """The rank of the last fetch for each request, and the pages that were cached and usable there."""
        self._writes: list[tuple[PageDevice[Any], list[BlockId], StagedPages]] = []
        self._job = FetchJob(device, stores, rule, stats, snapshots)
        self._threads = ThreadPoolExecutor(_MAX_JOBS, thread_name_prefix="kv-fetch")

    def unwritten(self, device: PageDevice[Any]) -> frozenset[BlockId]:
        """Return the blocks of a device whose write is queued."""
        return frozenset(block for each, blocks, _ in self._writes if each is device for block in blocks)

    def num_awaited(self, rank: int) -> int:
        """Return the pages of a data rank that requests will share once their fetch has ended."""
        return sum(len(fetch.hashes) for fetch in self._fetches if fetch.missing.rank == rank)

    def begin(self, key: RequestId, missing: MissingPrefix) -> bool:
        """Return True if request `key` should wait until `poll` returns it, because something that it misses is fetched."""
        state = missing.rank, missing.num_cached, missing.num_usable
        if self._tried.get(key) == state:
            return False
        for fetch in self._fetches:
            if fetch.brings(missing):
                self._tried[key] = state
                fetch.keys.append(key)
                return True
        plan, peers = plan_fetch(self._stores, missing), self._peers()
        if peers and (plan is None or plan.end < missing.longest):
            plan = None  # the job asks them
        elif plan is None:
            return False
        elif not self._rule.pays(plan.costs(self._device.layout), missing.num_saved(plan.end)):
            self._stats.skipped()
            self._tried[key] = state
            return False
        self._tried[key] = state
        now = self._clock()
        restored = RestoredPages(self._pool, missing.hashes, missing.num_cached, missing.rank)
        fetch = Fetch(missing, plan, peers, restored, [key], now, now)
        self._fetches.append(fetch)
        self._threads.submit(self._job.run, fetch)
        return True

    def forget(self, key: RequestId) -> None:
        """Count request `key` as started or ended."""
        self._tried.pop(key, None)
        for fetch in self._fetches:
            if key in fetch.keys:
                fetch.keys.remove(key)
                if not fetch.keys:
                    fetch.given_up.set()

    def poll(self, wait_s: float = 0.0) -> list[RequestId]:
        """Restore the batches that are ready; returns the requests whose fetch has ended, in any way.

        wait_s: how long to wait if nothing has ended.
        """
        if not self._fetches:
            return []
        ended = self._poll()
        if not ended and wait_s:
            self._job.wait(wait_s)
            ended = self._poll()
        return ended

    def write(self) -> None:
        """Dispatch the queued writes. If it raises, the device has lost all pages."""
        writes, self._writes = self._writes, []
        for device, blocks, staged in writes:
            device.write(blocks, staged)

    def lose_writes(self) -> None:
        """Drop the queued writes: the device has lost its pages."""
        self._writes.clear()

    def give_up(self) -> None:
        """End every fetch: the next `poll` returns their requests. Their pages leave the device's buffers, and get into no store."""
        self._job.give_up(self._fetches)
        for fetch in self._fetches:
            fetch.head = None

    def close(self) -> None:
        self.give_up()
        self._threads.shutdown(cancel_futures=True)

    def _poll(self) -> list[RequestId]:
        ended = [fetch for fetch in self._fetches if self._advance(fetch)]
        self._fetches = [fetch for fetch in self._fetches if fetch not in ended]
        for fetch in ended:
            fetch.given_up.set()
            fetch.restored.count_as_used()
            seconds = self._clock() - fetch.begun_s
            self._stats.took(seconds)
            self._rule.observe_fetch(fetch.tiers, seconds)
        return [key for fetch in ended for key in fetch.keys]

    def _advance(self, fetch: Fetch) -> bool:
        """Restore what is ready; returns True if the fetch has ended."""
        while not fetch.given_up.is_set():
            if fetch.head is None:
                try:
                    fetch.head = fetch.batches.get_nowait()
                except Empty:
                    break
                if fetch.head is None:
                    return True
            if not fetch.head.staged.is_ready():
                break
            if not self._restore(fetch, fetch.head):
                return True
            fetch.head, fetch.progress_s = None, self._clock()
        if self._clock() - fetch.progress_s > self._timeout_s:
            self._stats.failed("timeout")
            if fetch.plan is not None and not fetch.tiers:  # a tier that hangs would never be measured
                self._rule.observe_fetch(fetch.plan.costs(self._device.layout), self._clock() - fetch.begun_s)
            return True
        return fetch.given_up.is_set()

    def _restore(self, fetch: Fetch, batch: StagedBatch) -> bool:
        """Cache what `batch` brings; returns False if there is no place for it next to the pages before it."""
        is_restored = (
            self._restore_snapshot(fetch, batch) if is_snapshot(batch.names[0]) else self._restore_pages(fetch, batch)
        )
        if is_restored:
            for tier in sorted(set(batch.tiers)):
                names = [name for name, source in zip(batch.names, batch.tiers, strict=True) if source == tier]
                num_bytes = sum(self._device.layout.of(name).num_bytes for name in names)
                self._stats.fetched(tier, names, num_bytes)
        return is_restored

    def _restore_pages(self, fetch: Fetch, batch: StagedBatch) -> bool:
        blocks = fetch.restored.add(batch.staged.count)
        if blocks is None:
            return False
        self._writes.append((self._device, blocks, batch.staged))
        fetch.tiers += batch.tiers
        return True

    def _restore_snapshot(self, fetch: Fetch, batch: StagedBatch) -> bool:
        """Take a slot for the snapshot."""
        assert self._snapshots is not None, "a fetch of a snapshot"
        if not fetch.restored.are_cached():
            return False
        slot = self._snapshots.restore(hash_before(batch.names[0]), fetch.missing.rank)
        if slot is None:
            return False
        self._writes.append((self._snapshots.device, [slot], batch.staged))
        fetch.tiers += batch.tiers * snapshot_pages(self._device.layout)
        return True
