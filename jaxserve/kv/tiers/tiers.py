"""The tiers of one engine: stores, copies to them, fetches from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.config import TierConfig
from jaxserve.kv.block_pool import BlockPool
from jaxserve.kv.tiers.device import PageDevice
from jaxserve.kv.tiers.fetcher import PageFetcher
from jaxserve.kv.tiers.host import HostStore
from jaxserve.kv.tiers.rule import FetchRule
from jaxserve.kv.tiers.saver import PageSaver
from jaxserve.kv.tiers.stats import TierStats
from jaxserve.kv.tiers.store import PageStore


class KVTiers:
    """Stores of pages below one pool. All methods belong to the engine's thread.

    Call `write` before every step and `save` after every result; see PageFetcher and PageSaver.
    """

    def __init__(self, config: TierConfig, pool: BlockPool, device: PageDevice[Any], block_size: int) -> None:
        """Raises ConfigError."""
        self.stats = TierStats()
        self.rule = FetchRule(block_size, always=config.kv_fetch == "always")
        self.stores = _open_stores(config, device, self.stats)
        self.saver = PageSaver(pool, device, self.stores, self.stats)
        self.fetcher = PageFetcher(pool, device, self.stores, self.rule, self.stats, timeout_s=config.kv_fetch_timeout)

    @property
    def is_saving(self) -> bool:
        """True if `save` should be called again soon, although no step follows."""
        return self.saver.is_waiting

    def write(self) -> None:
        """Dispatch the writes of fetched pages. If it raises, the device has lost all pages."""
        self.fetcher.write()

    def save(self) -> None:
        """Start to copy published pages to the stores."""
        self.saver.save(self.fetcher.unwritten)

    def lose_device(self) -> None:
        """Drop work on pages of the device, which has lost them. The stores keep theirs."""
        self.saver.forget()
        self.fetcher.lose_writes()

    def clear(self) -> None:
        """Forget the pages of all tiers, and those on their way."""
        self.fetcher.give_up()
        self.saver.clear()
        for store in self.stores:
            store.clear()

    def close(self) -> None:
        self.fetcher.close()
        self.saver.close()
        for store in self.stores:
            store.close()


def _open_stores(config: TierConfig, device: PageDevice[Any], stats: TierStats) -> Sequence[PageStore]:
    """Return the stores of the settings, the fastest first."""
    stores: list[PageStore] = []
    if config.kv_offload_memory:
        stores.append(HostStore(device.layout, config.kv_offload_memory, stats))
    return stores
