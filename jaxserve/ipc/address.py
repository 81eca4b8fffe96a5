"""Where the two processes meet: a Unix socket in a directory that only its owner may enter.

The directory is locked as long as its server lives. A server that was killed leaves it behind, and the lock tells the
next one that nobody needs it any more, whatever became of process ids meanwhile, also across containers.
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
_PREFIX: Final = "jaxserve-ipc-"
_DIGITS: Final = 3
"""Of the number in a socket's name: all names are of one length, which is known to fit from the start."""
_MAX_PATH_BYTES: Final = 107
"""`sun_path` of a Linux socket address, without the closing zero."""


@contextlib.contextmanager
def own_address(directory: str | None = None) -> Iterator[str]:
    """A new address for the block, gone behind it. What killed servers left beside it is removed, too."""
    address, lock = _locked(directory)
    try:
        _remove_abandoned(folder_of(address).parent)
        yield address
    finally:
        discard_address(address)
        if lock is not None:
            os.close(lock)


def new_address(directory: str | None = None) -> str:
    """An unused address below `directory` (default: the temporary directory), in a fresh 0700 directory."""
    try:
        private = tempfile.mkdtemp(prefix=_PREFIX, dir=directory)  # mkdtemp makes it 0700
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
    """Where the engine listens that was started `number` times again: whoever still knows an earlier one cannot reach it."""
    return f"{address[:-_DIGITS]}{number % 10**_DIGITS:0{_DIGITS}}"  # the numbers begin again some day


def folder_of(address: str) -> Path:
    """The private directory of an address: other sockets of the same server may live there."""
    return Path(address.removeprefix(_SCHEME)).parent


def remove_socket(address: str) -> None:
    """Remove the socket of an engine that is gone. The directory is its owner's."""
    with contextlib.suppress(OSError):  # the directory is gone already
        Path(address.removeprefix(_SCHEME)).unlink(missing_ok=True)


def discard_address(address: str) -> None:
    """Remove what is left of an address: the socket, and its directory when nothing else is in it."""
    path = Path(address.removeprefix(_SCHEME))
    try:
        path.unlink(missing_ok=True)
        path.parent.rmdir()
    except OSError:
        return  # somebody else's file is in there, or the directory is gone already


def private_path(address: str) -> Path:
    """The socket path of `address`, once it is sure that nobody else can reach it.

    Makes the directory (0700) when it is missing; refuses one that others own or may enter.
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
    """A new address and the lock on its directory; None where the file system has no locks."""
    while True:
        address = new_address(directory)
        lock = _lock(folder_of(address))
        if lock is not None or folder_of(address).exists():
            return address, lock
        # another start took it for abandoned, in the moment before the lock


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the lock on `folder`; None where somebody else has it, or it is gone."""
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
    """Remove directories of ours that no living server has locked."""
    for folder in parent.glob(f"{_PREFIX}*"):
        lock = _lock(folder)
        if lock is None:
            continue
        with contextlib.suppress(OSError):  # somebody else's files are in there: they stay
            for path in folder.iterdir():
                if path.is_socket():
                    path.unlink()
            folder.rmdir()
        os.close(lock)


def _check_length(path: Path) -> None:
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigError(f"IPC socket path {str(path)!r} is longer than {_MAX_PATH_BYTES} bytes: shorten --uds-dir")
