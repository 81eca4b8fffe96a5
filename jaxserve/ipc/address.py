"""Addresses of engines: a Unix socket in a directory that only its owner may enter.

The directory is locked while its server runs. The directory of a server that was killed has no lock, so the next server
removes it; process ids play no part, so this works across containers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from jaxserve.errors import ConfigError

_SCHEME: Final = "ipc://"
FOLDER_PREFIX: Final = "jaxserve-ipc-"
"""Start of the name of a server's private directory."""
API_PREFIX: Final = "api-"
"""Start of the names of the API processes' files in it."""
_DIGITS: Final = 3
"""Digits of the number in a socket's name: all names have one length, which is checked at the start."""
_MAX_PATH_BYTES: Final = 107
"""`sun_path` of a Linux socket address, without the closing zero."""


@contextlib.contextmanager
def own_address(directory: str | None = None) -> Iterator[str]:
    """Yield a new address, and remove it after the block. Removes directories of killed servers as well."""
    address, lock = _locked(directory)
    try:
        _remove_abandoned(folder_of(address).parent)
        yield address
    finally:
        _remove_folder(folder_of(address))
        if lock is not None:
            os.close(lock)


def new_address(directory: str | None = None) -> str:
    """Return an unused address below `directory` (default: the temporary directory), in a new 0700 directory."""
    try:
        private = tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=directory)  # mkdtemp makes it 0700
    except OSError as error:
        where = "" if directory is None else f" in {directory!r}"
        raise ConfigError(f"cannot make a directory for the IPC socket{where}: {error.strerror} (--uds-dir)") from error
    path = Path(private, f"engine.{0:0{_DIGITS}}")
    try:
        _check_length(path)
    except ConfigError:
        path.parent.rmdir()
        raise
    return f"{_SCHEME}{path}"


def incarnation_address(address: str, number: int) -> str:
    """Return the address of the engine after `number` restarts, which no client of an earlier one knows."""
    return f"{address[:-_DIGITS]}{number % 10**_DIGITS:0{_DIGITS}}"  # numbers wrap around


def replica_address(address: str, replica: int) -> str:
    """Return the address of the first engine of a replica; that of the first replica is `address` itself.

    Raises ConfigError if the path is too long for a socket.
    """
    if not replica:
        return address
    path = folder_of(address) / f"engine-{replica}.{0:0{_DIGITS}}"
    _check_length(path)
    return f"{_SCHEME}{path}"


def folder_of(address: str) -> Path:
    """Return the private directory of an address; other sockets of the same server may be in it."""
    return Path(address.removeprefix(_SCHEME)).parent


def remove_socket(address: str) -> None:
    """Remove the socket of an engine that is gone, and keep the directory."""
    with contextlib.suppress(OSError):  # the directory is gone already
        Path(address.removeprefix(_SCHEME)).unlink(missing_ok=True)


def discard_address(address: str) -> None:
    """Remove the socket, and its directory if it is empty."""
    path = Path(address.removeprefix(_SCHEME))
    try:
        path.unlink(missing_ok=True)
        path.parent.rmdir()
    except OSError:
        return  # another file is in the directory, or it is gone already


def private_path(address: str) -> Path:
    """Return the socket path of `address`, in a directory that no other user can enter.

    Creates the directory (0700) if it is missing. Raises ConfigError if other users own it or may enter it.
    """
    path = Path(address.removeprefix(_SCHEME))
    if not address.startswith(_SCHEME) or not path.is_absolute():
        raise ConfigError(f"IPC address {address!r} must be {_SCHEME} and an absolute path")
    _check_length(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.parent.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"IPC directory {str(path.parent)!r} must be ours alone (mode 0700)")
    return path


def _locked(directory: str | None) -> tuple[str, int | None]:
    """Return a new address and the lock on its directory; None if the file system has no locks."""
    while True:
        address = new_address(directory)
        lock = _lock(folder_of(address))
        if lock is not None or folder_of(address).exists():
            return address, lock
        # another server removed it as abandoned before it was locked


def _lock(folder: Path) -> int | None:
    """Return a descriptor that holds the lock on `folder`; None if another process holds it, or it is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), folder.stat()):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _remove_abandoned(parent: Path) -> None:
    """Remove directories of servers that are gone: those without a lock."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        lock = _lock(folder)
        if lock is None:
            continue
        _remove_folder(folder)
        os.close(lock)


def _remove_folder(folder: Path) -> None:
    """Remove the private directory of a server. If other files are in it, they stay."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.is_socket() or path.name.startswith(API_PREFIX):
                path.unlink()
        folder.rmdir()


def _check_length(path: Path) -> None:
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigError(f"IPC socket path {str(path)!r} is longer than {_MAX_PATH_BYTES} bytes: shorten --uds-dir")
