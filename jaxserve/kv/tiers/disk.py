"""Pages in files, which survive a restart.

    DIRECTORY/                        0700, ours alone
      jaxserve-kv-IDENTITY/           pages of one layout; locked while an engine uses it
        3f/3fa2...e1.page             magic, checksum, blocks; named by the page's hash, or as a snapshot of recurrent states is
      jaxserve-kv-IDENTITY.1/         those of a second engine of the same layout, such as a replica on the same host

A folder of the same layout that no engine has used for a day, such as that of a replica that is not started any more, is removed.

A file is written under another name and renamed, so none is ever half there; a page whose checksum is wrong is deleted and
counts as missing. Writes, and the deletion of all pages, have a thread and a queue of their own: a slow disk loses pages, which
are counted, and delays nothing.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import Final

from jaxserve.kv.tiers.disk_folders import open_folder, remove_other_layouts, remove_unused
from jaxserve.kv.tiers.page import Page, PageLayout, check_holds_each, copy_page
from jaxserve.kv.tiers.page_file import (
    HEADER_BYTES,
    file_bytes,
    find_pages,
    page_path,
    read_page,
    write_order,
    write_page,
)
from jaxserve.kv.tiers.stats import TierStats
from jaxserve.types import BlockHash

_log = logging.getLogger(__name__)

_MAX_QUEUED_BYTES: Final = 64 << 20
_MIN_QUEUED: Final = 4
"""Pages or snapshots that may be queued even if they have more bytes."""
_LOOK_S: Final = 3600.0
"""Time until an engine looks for such folders, and between two looks. Other engines of a host start meanwhile."""
_QUIET_S: Final = 60.0
"""Time between two log lines about writes that fail."""


class _Files:
    """Names of the stored files, least recently used first, up to a number of bytes, and pages that wait to be written."""

    def __init__(self, max_bytes: int, layout: PageLayout) -> None:
        self._names = OrderedDict[BlockHash, None]()
        self.queued: dict[BlockHash, Page] = {}
        self._max_bytes = self.free_bytes = max_bytes
        self._layout = layout

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._names or name in self.queued

    def touch(self, name: BlockHash) -> bool:
        """Note that a page was used; returns False if it is not known."""
        if name in self._names:
            self._names.move_to_end(name)
        return name in self

    def add(self, name: BlockHash) -> list[BlockHash]:
        """Add a file; returns those that made place for it, which are forgotten."""
        self._names[name] = None
        self.free_bytes -= file_bytes(self._layout, name)
        dropped = []
        while self.free_bytes < 0:
            dropped.append(next(iter(self._names)))
            self.remove(dropped[-1])
        return dropped

    def remove(self, name: BlockHash) -> None:
        """Forget a file, if it is known."""
        if name in self._names:
            del self._names[name]
            self.free_bytes += file_bytes(self._layout, name)

    def names(self) -> list[BlockHash]:
        """Return the names of all files, least recently used first."""
        return list(self._names)

    def clear(self) -> Iterable[BlockHash]:
        """Forget all pages, in a time that does not depend on the number of files; returns those."""
        self.queued = {}
        names, self._names = self._names, OrderedDict()
        self.free_bytes = self._max_bytes
        return names


class DiskStore:
    """Pages and snapshots of one layout in one directory, up to a number of bytes; the least recently used ones make place."""

    tier = "disk"

    def __init__(self, layout: PageLayout, directory: str, num_bytes: int, stats: TierStats) -> None:
        """Raises ConfigError for a directory that others may enter or that cannot be used."""
        check_holds_each("--kv-offload-disk", num_bytes, layout, HEADER_BYTES)
        self._layout = layout
        self._stats = stats
        self.max_pages = num_bytes // (HEADER_BYTES + layout.num_bytes)
        self._folder, self._lock_file = open_folder(Path(directory).expanduser(), layout.identity)
        self._lock = threading.Lock()
        self._files = _Files(num_bytes, layout)
        for name in find_pages(self._folder, layout):
            self._delete(self._files.add(name))
        self._others_bytes = remove_other_layouts(self._folder, self._files.free_bytes)
        """Bytes of folders of other layouts that no engine used at the last look."""
        self._quiet_until_s = 0.0
        """Time until which writes that fail are counted, and not logged."""
        self._queue: Queue[Callable[[], None] | None] = Queue()
        self._queued_bytes = 0
        """Bytes that wait to be written, those that were cleared since among them."""
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        self._thread.start()

    def num_leading(self, names: Sequence[BlockHash]) -> int:
        with self._lock:
            return next((i for i, name in enumerate(names) if name not in self._files), len(names))

    def find_first(self, names: Sequence[BlockHash]) -> int | None:
        with self._lock:
            return next((i for i, name in enumerate(names) if name in self._files), None)

    def get(self, names: Sequence[BlockHash], pages: Sequence[Page]) -> int:
        for count, (name, page) in enumerate(zip(names, pages, strict=True)):
            with self._lock:
                queued = self._files.queued.get(name)
                is_known = name in self._files
            if queued is not None:
                copy_page(queued, page)
            elif not (is_known and self._read(name, page)):
                return count
        return len(names)

    def touch(self, names: Collection[BlockHash]) -> list[BlockHash]:
        with self._lock:
            return [name for name in names if not self._files.touch(name)]

    def put(self, name: BlockHash, page: Page) -> None:
        """Queue a page; it is in a file a little later, or lost if too much waits."""
        size = file_bytes(self._layout, name)
        with self._lock:
            if name in self._files:
                return
            is_busy = self._queued_bytes + size > max(_MAX_QUEUED_BYTES, _MIN_QUEUED * size)
            if not is_busy:
                self._queued_bytes += size
                self._files.queued[name] = page
        if is_busy:
            self._stats.failed("disk_busy")
        else:
            self._queue.put(partial(self._write, name, page))

    def clear(self) -> None:
        """Forget every page; the files are deleted a little later, before any page that is put from now on is stored."""
        with self._lock:
            self._queue.put(partial(self._delete, self._files.clear()))

    def settle(self) -> None:
        """Return when everything that was put before is stored, and everything that was cleared is deleted."""
        self._queue.join()

    def close(self) -> None:
        """Finish what is queued, and unlock the folder."""
        self._queue.put(None)
        self._thread.join()
        self._note_use()
        os.close(self._lock_file)

    def _read(self, block_hash: BlockHash, page: Page) -> bool:
        """Read a file into `page`. Returns False for one that is gone or damaged, which is forgotten."""
        path = page_path(self._folder, block_hash)
        try:
            if read_page(path, page):
                return True
        except OSError as error:
            self._forget(block_hash, "disk_read", f"{path}: {error.strerror}")
        else:
            self._forget(block_hash, "checksum", f"{path}: damaged")
        return False

    def _forget(self, block_hash: BlockHash, reason: str, text: str) -> None:
        _log.warning("a KV page is lost: %s", text)
        self._stats.failed(reason)
        with self._lock:
            self._files.remove(block_hash)
        self._stats.lost([block_hash])
        self._delete([block_hash])

    def _delete(self, names: Iterable[BlockHash]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                page_path(self._folder, name).unlink(missing_ok=True)

    def _run(self) -> None:
        """Do what is queued, and look at the folders once in a while; the thread's work."""
        look_s = time.monotonic() + _LOOK_S
        while True:
            if time.monotonic() >= look_s:
                look_s = time.monotonic() + _LOOK_S
                self._note_use()
                with contextlib.suppress(OSError):
                    remove_unused(self._folder)
                    self._others_bytes = remove_other_layouts(self._folder, self._files.free_bytes)
            try:
                work = self._queue.get(timeout=max(0.0, look_s - time.monotonic()))
            except Empty:
                continue
            try:
                if work is None:
                    return
                work()
            finally:
                self._queue.task_done()

    def _note_use(self) -> None:
        """Keep the time, and the order in which pages were used, for the next engine: on a full disk the time only."""
        with self._lock:
            names = self._files.names()
        with contextlib.suppress(OSError):
            os.utime(self._lock_file)
            write_order(self._folder, names)

    def _write(self, name: BlockHash, page: Page) -> None:
        """Store a queued page, unless it is cleared before its end."""
        is_written = False
        try:
            if self._files.queued.get(name) is page:
                write_page(page_path(self._folder, name), page)
                is_written = True
        except OSError as error:  # a full or broken disk: the page is computed again if it is needed
            self._stats.failed("disk_write")
            if time.monotonic() >= self._quiet_until_s:
                self._quiet_until_s = time.monotonic() + _QUIET_S
                _log.warning("KV pages cannot be stored: %s", error)
            if error.errno == errno.ENOSPC and self._others_bytes:
                self._others_bytes = remove_other_layouts(self._folder, self._others_bytes - 1)
        with self._lock:
            self._queued_bytes -= file_bytes(self._layout, name)
            if is_wanted := self._files.queued.get(name) is page:
                del self._files.queued[name]
            is_stored = is_written and is_wanted
            dropped = self._files.add(name) if is_stored else []
        if is_stored:
            self._stats.stored(self.tier, name, self._layout.of(name).num_bytes)
        elif is_wanted:
            self._stats.lost([name])
        elif is_written:
            self._delete([name])
        self._delete(dropped)
        for old in dropped:
            self._stats.evicted(self.tier, old)
        if self._others_bytes > self._files.free_bytes:
            self._others_bytes = remove_other_layouts(self._folder, self._files.free_bytes)
