"""Where the two processes meet: a Unix socket in a directory that only its owner may enter."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Final

from jaxserve.errors import ConfigError

_SCHEME: Final = "ipc://"
_MAX_PATH_BYTES: Final = 107
"""`sun_path` of a Linux socket address, without the closing zero."""


def new_address(directory: str | None = None) -> str:
    """An unused address below `directory` (default: the temporary directory), in a fresh 0700 directory."""
    try:
        private = tempfile.mkdtemp(prefix="jaxserve-", dir=directory)  # mkdtemp makes it 0700
    except OSError as error:
        raise ConfigError(f"cannot make a directory for the IPC socket in {directory!r}: {error.strerror}") from error
    return f"{_SCHEME}{private}/engine.sock"


def folder_of(address: str) -> Path:
    """The private directory of an address: other sockets of the same server may live there."""
    return Path(address.removeprefix(_SCHEME)).parent


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
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigError(f"IPC socket path {str(path)!r} is longer than {_MAX_PATH_BYTES} bytes: shorten --uds-dir")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.parent.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"IPC directory {str(path.parent)!r} must be ours alone (mode 0700)")
    return path
