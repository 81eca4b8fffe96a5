"""Copies every published page, and every published snapshot of recurrent states, from the device to the tiers, while steps go on.

A page is copied once, after it is full, and not when it is evicted: then its copy would have to be waited for, and a long
prompt that evicts another one would move thousands of pages at once. So eviction costs nothing and loses nothing, except
pages that were evicted before their turn to be copied. A page that the device still has when a request has used it, and the
tiers have not, is copied again if a tier holds more pages than the device: a smaller one would evict others for it that the
device still has, too. The same holds for snapshots, which are named by the hash of the last page before them; here both are
called pages.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final, NamedTuple

from jaxserve.kv.tiers.device import PageDevice, PendingPages
from jaxserve.kv.tiers.stats import TierStats
from jaxserve.kv.tiers.store import OwnStore
from jaxserve.types import BlockHash, BlockId

_log = logging.getLogger(__name__)

_MAX_COPIES: Final = 8
"""Batches whose buffers may lie on the device at a time; further pages wait in the pool."""
_MAX_COPY_BYTES: Final = 128 << 20
"""Bytes of these batches, unless there is only one."""


class _Use(NamedTuple):
    """Pages that a request has used, the first one last."""

    hashes: Sequence[BlockHash]
    publishes: bool
    """True: those that no store has are copied again."""


class PageSaver:
    """The pages that wait for their copy. `publish`, `use`, `save`, `forget` and `clear` belong to the engine's thread."""

    def __init__(
        self,
        find: Callable[[BlockHash], BlockId | None],
        device: PageDevice[Any],
        stores: Sequence[OwnStore],
        stats: TierStats,
        *,
        copies_again: bool,
        name: Callable[[BlockHash], BlockHash] = lambda block_hash: block_hash,
    ) -> None:
        """Every page goes to all `stores`. find: returns where the device has a page, None if it was evicted. copies_again: True:
        pages that a request has used, and no store has any more, are copied again. name: returns the name that stores have for it."""
        self._find = find
        self._copies_again = copies_again
        self._name = name
        self._device = device
        batch_bytes = device.max_batch * device.layout.num_bytes
        self._max_copies = max(1, min(_MAX_COPIES, _MAX_COPY_BYTES // batch_bytes))
        self._stores = stores
        self._stats = stats
        self._waiting: deque[BlockHash | _Use] = deque()
        """Pages that wait for their copy, and uses that stores learn of after the copies before them."""
        self._copies: set[Future[None]] = set()
        self._uses: dict[Future[list[BlockHash]], _Use] = {}
        """The uses that stores are learning of."""
        self._lock = threading.Lock()
        self._coming: dict[BlockHash, int] = {}
        """Copies that wait or are under way, by name, for other threads."""
        self._epoch = 0
        """Number of calls of `clear`."""
        self._storing = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-save")

    @property
    def is_waiting(self) -> bool:
        """True if pages wait for a call of `save`."""
        return bool(self._waiting or self._uses)

    def publish(self, block_hash: BlockHash) -> None:
        """Copy this page at the next `save`: the pool has it, and no step writes to it any more."""
        if any(not store.num_leading([self._name(block_hash)]) for store in self._stores):
            self._waiting.append(block_hash)
            self._count_coming([block_hash], 1)

    def use(self, hashes: Sequence[BlockHash]) -> None:
        """Count the pages of a request as used: stores evict the end of a prefix before its start."""
        if self._stores:
            self._waiting.append(_Use(hashes[::-1], publishes=self._copies_again))

    def is_coming(self, name: BlockHash) -> bool:
        """Return True if a copy of the page with this name in the stores waits or is under way. Any thread may call it."""
        with self._lock:
            return name in self._coming

    def save(self, unwritten: Collection[BlockId] = ()) -> None:
        """Start the copies of pages that wait, as many as may be under way.

        unwritten: pages whose content the device does not have yet.
        """
        self._copies = {copy for copy in self._copies if not copy.done()}
        self._publish_lost()
        while self._waiting and len(self._copies) < self._max_copies:
            found: dict[BlockHash, BlockId] = {}
            while self._waiting and len(found) < self._device.max_batch:
                if isinstance(block_hash := self._waiting[0], _Use):
                    break
                self._waiting.popleft()
                block = self._find(block_hash)
                if block is None or block in unwritten or block_hash in found:
                    self._count_coming([block_hash], -1)
                    self._stats.failed("evicted_early", int(block is None))
                else:
                    found[block_hash] = block
            if found:
                self._copy(tuple(found), list(found.values()))
            elif self._waiting and isinstance(use := self._waiting[0], _Use):
                self._waiting.popleft()
                self._uses[self._thread.submit(self._touch, use)] = use

    def forget(self) -> None:
        """Drop the pages that wait: the device has lost them."""
        self._count_coming([entry for entry in self._waiting if not isinstance(entry, _Use)], -1)
        self._waiting.clear()
        self._uses.clear()

    def clear(self) -> None:
        """Drop the pages that wait and those under way."""
        self.forget()
        with self._storing:
            self._epoch += 1

    def settle(self) -> None:
        """Save everything that waits, and return when it is stored."""
        while self._waiting or self._copies or self._uses:
            self.save()
            wait(self._copies)
            wait(self._uses)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _copy(self, hashes: tuple[BlockHash, ...], blocks: list[BlockId]) -> None:
        try:
            pending = self._device.read(blocks)
        except Exception:  # no memory for the buffer: the pages are computed again if they are needed
            _log.exception("%d KV pages could not be read from the device", len(blocks))
            self._stats.failed("read", len(blocks))
            self._count_coming(hashes, -1)
            return
        self._copies.add(self._thread.submit(self._store, pending, hashes, self._epoch))

    def _store(self, pending: PendingPages, hashes: Sequence[BlockHash], epoch: int) -> None:
        """Wait for the pages and put them into the stores."""
        try:
            for block_hash, page in zip(hashes, pending.pages(), strict=True):
                with self._storing:
                    if epoch != self._epoch:
                        return
                    for store in self._stores:
                        store.put(self._name(block_hash), page)
        except Exception as error:  # the step that computed the pages failed, or a store
            _log.warning("%d KV pages were not saved: %s", len(hashes), error)
            self._stats.failed("save", len(hashes))
        finally:
            self._count_coming(hashes, -1)

    def _touch(self, use: _Use) -> list[BlockHash]:
        """Let the stores count pages as used; returns those that none has."""
        names = {self._name(block_hash): block_hash for block_hash in use.hashes}
        missing = set(names)
        for store in self._stores:
            missing &= set(store.touch(names))
        return [block_hash for name, block_hash in names.items() if name in missing]

    def _publish_lost(self) -> None:
        """Copy again what was used and is in no store, as long as the device has it."""
        for touched, use in [entry for entry in self._uses.items() if entry[0].done()]:
            del self._uses[touched]
            if not use.publishes:
                continue
            lost = [
                block_hash
                for block_hash in reversed(touched.result())
                if self._find(block_hash) is not None and not self.is_coming(self._name(block_hash))
            ]
            if lost:
                self._count_coming(lost, 1)
                self._waiting += [*lost, use._replace(publishes=False)]

    def _count_coming(self, hashes: Collection[BlockHash], change: int) -> None:
        ended = []
        with self._lock:
            for name in map(self._name, hashes):
                count = self._coming.get(name, 0) + change
                if count > 0:
                    self._coming[name] = count
                elif self._coming.pop(name, None):
                    ended.append(name)
        self._stats.lost(ended)  # unless they are stored
