"""The tiers of one engine: stores, copies to them, fetches from them, and the exchange with peers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from jaxserve.config import TierConfig
from jaxserve.kv.block_pool import BlockPool
from jaxserve.kv.manager import KVManager
from jaxserve.kv.page_changes import PageChanges
from jaxserve.kv.tiers.device import PageDevice
from jaxserve.kv.tiers.disk import DiskStore
from jaxserve.kv.tiers.fetcher import PageFetcher
from jaxserve.kv.tiers.host import HostStore
from jaxserve.kv.tiers.page import PageLayout, snapshot_name
from jaxserve.kv.tiers.peer import Peers
from jaxserve.kv.tiers.rule import FetchRule
from jaxserve.kv.tiers.saver import PageSaver
from jaxserve.kv.tiers.server import PageServer
from jaxserve.kv.tiers.snapshots import Snapshots
from jaxserve.kv.tiers.stats import TierStats
from jaxserve.kv.tiers.store import OwnStore
from jaxserve.kv.tiers.wire import endpoint_of
from jaxserve.types import BlockHash


class KVTiers:
    """Stores of pages below one pool. All methods belong to the engine's thread.

    Call `write` before every step and `save` after every result; see PageFetcher and PageSaver.
    """

    def __init__(
        self,
        config: TierConfig,
        pool: BlockPool,
        device: PageDevice[Any],
        block_size: int,
        changes: PageChanges | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        """changes: gets pages that only a tier holds as well. snapshots: those of a model with recurrent states. Raises
        ConfigError."""
        self._pool = pool
        self._block_size = block_size
        self._changes = changes
        token = config.kv_peer_token or ""
        own = None if config.kv_listen is None else endpoint_of(config.kv_listen, "--kv-listen", token)
        self.are_shared = config.are_shared
        """True if pages outlive the engine, or move between engines."""
        self.stats = TierStats(keeps_lost=changes is not None)
        self.rule = FetchRule(block_size, always=config.kv_fetch == "always")
        self._stores = _open_stores(config, device.layout, self.stats)
        self._peers = Peers(device.layout, config.peers, token, config.kv_fetch_timeout, self.stats, own=own)
        self._device = device
        self._snapshots = snapshots
        copies_again = max((store.max_pages for store in self._stores), default=0) > pool.num_usable
        self.saver = PageSaver(
            partial(pool.find, rank=None), device, self._stores, self.stats, copies_again=copies_again
        )
        self._snapshot_saver: PageSaver | None = None
        if snapshots is not None:
            self._snapshot_saver = PageSaver(
                snapshots.find,
                snapshots.device,
                self._stores,
                self.stats,
                copies_again=copies_again,
                name=snapshot_name,
            )
        self.fetcher = PageFetcher(
            pool,
            device,
            self._stores,
            self.rule,
            self.stats,
            peers=self._peers.stores,
            snapshots=snapshots,
            timeout_s=config.kv_fetch_timeout,
        )
        self._server: PageServer | None = None
        if own is not None:
            self._server = PageServer(device.layout, self._stores, self._is_coming, own, token)
        if changes is not None:
            changes.is_kept = self.holds

    @property
    def is_saving(self) -> bool:
        """True if `save` should be called again soon, although no step follows."""
        return any(saver.is_waiting for saver in self._savers)

    @property
    def _savers(self) -> tuple[PageSaver, ...]:
        return (self.saver,) if self._snapshot_saver is None else (self.saver, self._snapshot_saver)

    def _is_coming(self, name: BlockHash) -> bool:
        """Return True if a copy of the page or snapshot of this name waits or is under way. Any thread may call it."""
        return any(saver.is_coming(name) for saver in self._savers)

    def follow(self, kv: KVManager) -> None:
        """Copy from now on whatever pages and snapshots `kv` publishes, and keep what its requests use."""
        kv.on_publish, kv.on_free = self.saver.publish, self._use
        if self._snapshot_saver is not None:
            for states in kv.groups.states:
                states.on_publish = self._snapshot_saver.publish

    def _use(self, hashes: Sequence[BlockHash]) -> None:
        self.saver.use(hashes)
        if self._snapshots is not None and self._snapshot_saver is not None:
            every = self._snapshots.states[0].unit // self._block_size
            self._snapshot_saver.use(hashes[every - 1 :: every])

    def settle(self) -> None:
        """Save everything that waits, and return when it is stored."""
        for saver in self._savers:
            saver.settle()

    def holds(self, block_hash: BlockHash) -> bool:
        """Return True if a store of this engine has the page, or will have it soon."""
        return self.saver.is_coming(block_hash) or any(store.num_leading([block_hash]) for store in self._stores)

    def write(self) -> None:
        """Dispatch the writes of fetched pages. If it raises, the device has lost all pages."""
        self.fetcher.write()

    def save(self) -> None:
        """Start to copy published pages and snapshots to the stores."""
        self.saver.save(self.fetcher.unwritten(self._device))
        if self._snapshots is not None and self._snapshot_saver is not None:
            self._snapshot_saver.save(self.fetcher.unwritten(self._snapshots.device))
        if self._changes is not None:
            self._note_dropped(self._changes, self.stats.take_lost())

    def lose_device(self) -> None:
        """Drop work on pages of the device, which has lost them. The stores keep theirs."""
        for saver in self._savers:
            saver.forget()
        self.fetcher.lose_writes()
        if self._changes is not None:
            self._note_dropped(self._changes, self.stats.take_lost())

    def clear(self) -> None:
        """Forget the pages of all tiers of this engine, and those on their way."""
        self.fetcher.give_up()
        for saver in self._savers:
            saver.clear()
        for store in self._stores:
            store.clear()
        if self._changes is not None:
            self._note_dropped(self._changes, self._changes.held())

    def release_memory(self) -> None:
        """Forget the pages in host memory, and give it back. Other tiers keep theirs."""
        for store in self._stores:
            if store.tier == HostStore.tier:
                store.clear()
        if self._changes is not None:
            self._note_dropped(self._changes, self._changes.held())

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._peers.close()
        self.fetcher.close()
        for saver in self._savers:
            saver.close()
        for store in self._stores:
            store.close()

    def _note_dropped(self, changes: PageChanges, hashes: list[BlockHash]) -> None:
        for block_hash in hashes:
            if self._pool.find(block_hash, rank=None) is None:
                changes.remove(block_hash)


def _open_stores(config: TierConfig, layout: PageLayout, stats: TierStats) -> list[OwnStore]:
    """Return the stores of the settings, the fastest first."""
    stores: list[OwnStore] = []
    if config.kv_offload_memory:
        stores.append(HostStore(layout, config.kv_offload_memory, stats))
    if config.kv_offload_dir is not None:
        stores.append(DiskStore(layout, config.kv_offload_dir, config.kv_offload_disk, stats))
    return stores
