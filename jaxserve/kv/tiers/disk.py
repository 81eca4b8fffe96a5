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
import fcntl
import itertools
import logging
import os
import shutil
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import Final

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.kv.tiers.page import CHECKSUM_BYTES, Page, PageLayout, check_holds_each, checksum
from jaxserve.kv.tiers.stats import TierStats
from jaxserve.types import BlockHash

_log = logging.getLogger(__name__)

_MAGIC: Final = b"jaxserve-kv-page"
_HEADER_BYTES: Final = len(_MAGIC) + CHECKSUM_BYTES
_PREFIX: Final = "jaxserve-kv-"
_SUFFIX: Final = ".page"
_MAX_QUEUED_BYTES: Final = 64 << 20
_MIN_QUEUED: Final = 4
"""Pages or snapshots that may be queued even if they have more bytes."""
_UNUSED_S: Final = 24 * 3600.0
"""Time without an engine after which a folder is removed: longer than a server is stopped for an update or a repair."""
_LOOK_S: Final = 3600.0
"""Time until an engine looks for such folders, and between two looks. Other engines of a host start meanwhile."""


def _file_bytes(layout: PageLayout, name: BlockHash) -> int:
    """Return the bytes of the file of this name."""
    return _HEADER_BYTES + layout.of(name).num_bytes


class _Files:
    """Names of the stored files, least recently used first, up to a number of bytes."""

    def __init__(self, max_bytes: int, layout: PageLayout) -> None:
        self._names = OrderedDict[BlockHash, None]()
        self._max_bytes = self._free_bytes = max_bytes
        self._layout = layout

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._names

    def touch(self, name: BlockHash) -> None:
        """Note that a file was used."""
        self._names.move_to_end(name)

    def add(self, name: BlockHash) -> list[BlockHash]:
        """Add a file; returns those that made place for it, which are forgotten."""
        self._names[name] = None
        self._free_bytes -= _file_bytes(self._layout, name)
        dropped = []
        while self._free_bytes < 0:
            dropped.append(next(iter(self._names)))
            self.remove(dropped[-1])
        return dropped

    def remove(self, name: BlockHash) -> None:
        """Forget a file, if it is known."""
        if name in self._names:
            del self._names[name]
            self._free_bytes += _file_bytes(self._layout, name)

    def clear(self) -> Iterable[BlockHash]:
        """Forget all files, in a time that does not depend on their number; returns them."""
        names, self._names = self._names, OrderedDict()
        self._free_bytes = self._max_bytes
        return names


class DiskStore:
    """Pages and snapshots of one layout in one directory, up to a number of bytes; the least recently used ones make place."""

    tier = "disk"

    def __init__(self, layout: PageLayout, directory: str, num_bytes: int, stats: TierStats) -> None:
        """Raises ConfigError for a directory that others may enter or that cannot be used."""
        check_holds_each("--kv-offload-disk", num_bytes, layout, _HEADER_BYTES)
        self._layout = layout
        self._stats = stats
        self._folder, self._lock_file = _open_folder(Path(directory).expanduser(), layout.identity)
        _remove_other_layouts(self._folder, num_bytes)
        self._lock = threading.Lock()
        self._files = _Files(num_bytes, layout)
        self._find_files()
        self._queue: Queue[Callable[[], None] | None] = Queue()
        self._queued_bytes = 0
        """Bytes that wait to be written."""
        self._epoch = 0
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
                if name not in self._files:
                    return count
                self._files.touch(name)
            if not self._read(name, page):
                return count
        return len(names)

    def put(self, name: BlockHash, page: Page) -> None:
        """Queue a page; it is stored a little later, or lost if too much waits."""
        size = _file_bytes(self._layout, name)
        with self._lock:
            if name in self._files:
                self._files.touch(name)
                return
            is_busy = self._queued_bytes + size > max(_MAX_QUEUED_BYTES, _MIN_QUEUED * size)
            if not is_busy:
                self._queued_bytes += size
            epoch = self._epoch
        if is_busy:
            self._stats.failed("disk_busy")
        else:
            self._queue.put(partial(self._write, name, page, epoch))

    def clear(self) -> None:
        """Forget every page; the files are deleted a little later, before any page that is put from now on is stored."""
        with self._lock:
            self._epoch += 1
            self._queue.put(partial(self._delete, self._files.clear()))

    def settle(self) -> None:
        """Return when everything that was put before is stored, and everything that was cleared is deleted."""
        self._queue.join()

    def close(self) -> None:
        """Finish what is queued, and unlock the folder."""
        self._queue.put(None)
        self._thread.join()
        with contextlib.suppress(OSError):
            os.utime(self._lock_file)
        os.close(self._lock_file)

    def _path(self, block_hash: BlockHash) -> Path:
        name = block_hash.hex()
        return self._folder / name[:2] / f"{name}{_SUFFIX}"

    def _find_files(self) -> None:
        """Take the pages of earlier servers; delete what is no whole page, and the oldest ones beyond the limit."""
        found: list[tuple[float, BlockHash]] = []
        for path in self._folder.glob("??/*"):
            try:
                block_hash, status = BlockHash(bytes.fromhex(path.name.removesuffix(_SUFFIX))), path.lstat()
                is_page = stat.S_ISREG(status.st_mode) and status.st_size == _file_bytes(self._layout, block_hash)
            except (OSError, ValueError):
                is_page = False
            if is_page and path == self._path(block_hash):
                found.append((status.st_mtime, block_hash))
            else:
                path.unlink(missing_ok=True)
        for _, block_hash in sorted(found):
            self._delete(self._files.add(block_hash))

    def _read(self, block_hash: BlockHash, page: Page) -> bool:
        """Read a file into `page`. Returns False for one that is gone or damaged, which is forgotten."""
        path = self._path(block_hash)
        try:
            with path.open("rb", buffering=0) as file:
                header = file.read(_HEADER_BYTES)
                sizes = [file.readinto(memoryview(block)) for block in page]  # type: ignore[arg-type]
        except OSError as error:
            self._forget(block_hash, "disk_read", f"{path}: {error.strerror}")
            return False
        whole = sizes == [block.num_bytes for block in self._layout.of(block_hash).blocks]
        if not whole or header != _MAGIC + checksum(page):
            self._forget(block_hash, "checksum", f"{path}: damaged")
            return False
        return True

    def _forget(self, block_hash: BlockHash, reason: str, text: str) -> None:
        _log.warning("a KV page is lost: %s", text)
        self._stats.failed(reason)
        with self._lock:
            self._files.remove(block_hash)
        self._delete([block_hash])

    def _delete(self, names: Iterable[BlockHash]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                self._path(name).unlink(missing_ok=True)

    def _run(self) -> None:
        """Do what is queued, and look at the folders once in a while; the thread's work."""
        look_s = time.monotonic() + _LOOK_S
        while True:
            if time.monotonic() >= look_s:
                look_s = time.monotonic() + _LOOK_S
                with contextlib.suppress(OSError):
                    os.utime(self._lock_file)
                    _remove_unused(self._folder)
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

    def _write(self, block_hash: BlockHash, page: Page, epoch: int) -> None:
        """Store a page, unless it is known or the store was cleared after `epoch`."""
        try:
            with self._lock:
                if block_hash in self._files or epoch != self._epoch:
                    return
            _write_file(self._path(block_hash), page)
        except OSError as error:  # a full or broken disk: the page is computed again if it is needed
            self._stats.failed("disk_write")
            _log.warning("a KV page could not be stored: %s", error)
            return
        finally:
            with self._lock:
                self._queued_bytes -= _file_bytes(self._layout, block_hash)
        with self._lock:
            is_cleared = epoch != self._epoch
            dropped = [block_hash] if is_cleared else self._files.add(block_hash)
        self._delete(dropped)
        if is_cleared:
            return
        self._stats.stored(self.tier, block_hash, self._layout.of(block_hash).num_bytes)
        for old in dropped:
            self._stats.evicted(self.tier, old)


def _write_file(path: Path, page: Page) -> None:
    """Write a page under another name and rename it. Raises OSError."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    unfinished = path.with_suffix(".part")
    try:
        with unfinished.open("wb", buffering=0) as file:
            file.write(_MAGIC + checksum(page))
            for block in page:
                _write_all(file.fileno(), np.ascontiguousarray(block).data)
        unfinished.rename(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def _write_all(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _open_folder(directory: Path, identity: str) -> tuple[Path, int]:
    """Return the first folder of a layout that no other engine uses, and the descriptor that holds its lock. Raises ConfigError."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(f"--kv-offload-dir {str(directory)!r} must be ours alone (mode 0700)")
        name = f"{_PREFIX}{identity}"
        for number in itertools.count():
            folder = directory / (f"{name}.{number}" if number else name)
            folder.mkdir(mode=0o700, exist_ok=True)
            if (lock := _try_lock(folder)) is not None:
                os.utime(lock)  # it is in use: otherwise it looks unused until the engine's first look at the folders
                return folder, lock
    except OSError as error:
        raise ConfigError(f"--kv-offload-dir {str(directory)!r} cannot be used: {error.strerror}") from error
    raise AssertionError("unreachable")


def _try_lock(folder: Path) -> int | None:
    """Return the descriptor that holds the lock of a folder, or None if another engine holds it or has removed the folder.

    Raises OSError.
    """
    with contextlib.suppress(BlockingIOError, FileNotFoundError), contextlib.ExitStack() as unlock:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        unlock.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), folder.stat()):
            unlock.pop_all()
            return lock
    return None


def _remove_other_layouts(own: Path, num_bytes: int) -> None:
    """Remove folders of other layouts that no engine uses, oldest first, until they and ours have `num_bytes` at most."""
    folders = sorted(own.parent.glob(f"{_PREFIX}*"), key=_last_change)
    sizes = {folder: _bytes_in(folder) for folder in folders}
    total = sum(size for folder, size in sizes.items() if folder == own or folder.stem != own.stem)
    for folder, size in sizes.items():
        if total <= num_bytes:
            return
        if folder.stem == own.stem:
            continue
        _remove_if_unlocked(folder)
        if not folder.exists():  # this engine or another one has removed it
            total -= size


def _remove_unused(own: Path) -> None:
    """Remove folders of the same layout that were last used `_UNUSED_S` before `own`, which is in use."""
    for folder in own.parent.glob(f"{own.stem}*"):
        if folder.stem == own.stem and _last_change(folder) < _last_change(own) - _UNUSED_S:
            _remove_if_unlocked(folder)


def _remove_if_unlocked(folder: Path) -> None:
    """Remove a folder that no engine uses."""
    with contextlib.suppress(OSError):  # it cannot be opened
        if (lock := _try_lock(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _last_change(folder: Path) -> float:
    """Return the time of a folder's last change; 0 if it is gone."""
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _bytes_in(folder: Path) -> int:
    """Return the bytes of the files in a folder, whose engine may write, rename and remove some meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):  # passes over folders that are gone
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += Path(parent, name).stat().st_size
    return total
