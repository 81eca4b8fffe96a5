"""The folders of engines in the directory of their files: one of each layout and engine, locked while the engine uses it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import stat
from pathlib import Path
from typing import Final

from jaxserve.errors import ConfigError

_PREFIX: Final = "jaxserve-kv-"
_UNUSED_S: Final = 24 * 3600.0
"""Time without an engine after which a folder is removed: longer than a server is stopped for an update or a repair."""


def open_folder(directory: Path, identity: str) -> tuple[Path, int]:
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


def remove_other_layouts(own: Path, num_bytes: int) -> int:
    """Remove folders of other layouts that no engine uses, oldest first, until they have `num_bytes` at most; returns the bytes of the
    others."""
    folders = [folder for folder in own.parent.glob(f"{_PREFIX}*") if folder.stem != own.stem]
    unused = {folder: _bytes_in(folder) for folder in sorted(folders, key=_last_change) if _is_unused(folder)}
    for folder in list(unused):
        if sum(unused.values()) <= num_bytes:
            break
        _remove_if_unlocked(folder)
        del unused[folder]  # it is gone, or an engine has taken it
    return sum(unused.values())


def remove_unused(own: Path) -> None:
    """Remove folders of the same layout that were last used `_UNUSED_S` before `own`, which is in use."""
    for folder in own.parent.glob(f"{own.stem}*"):
        if folder.stem == own.stem and _last_change(folder) < _last_change(own) - _UNUSED_S:
            _remove_if_unlocked(folder)


def _is_unused(folder: Path) -> bool:
    with contextlib.suppress(OSError):  # it cannot be opened
        if (lock := _try_lock(folder)) is not None:
            os.close(lock)
            return True
    return False


def _remove_if_unlocked(folder: Path) -> None:
    """Remove a folder that no engine uses."""
    with contextlib.suppress(OSError):  # it cannot be opened
        if (lock := _try_lock(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _last_change(folder: Path) -> float:
    """Return the time of a folder's last change; 0 if it is gone or unreadable."""
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def _bytes_in(folder: Path) -> int:
    """Return the bytes of the pages in a folder, whose engine may write, rename and remove some meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):  # passes over folders that are gone
        for name in names if Path(parent) != folder else ():
            with contextlib.suppress(OSError):
                total += Path(parent, name).stat().st_size
    return total
