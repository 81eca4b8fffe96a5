"""The operator's Unix socket (--admin-socket): made beside its path first, so that the server which has the path keeps it."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from jaxserve.errors import ConfigError

_CONNECT_S = 1.0


class OperatorSocket:
    """A bound Unix socket, for its owner only, that takes its path with `publish`."""

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self._path, self._bound = path, f"{path}~"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._bound)
            self.listener.bind(self._bound)
            self._inode = os.stat(self._bound).st_ino
        except OSError:
            self.listener.close()
            raise
        finally:
            os.umask(mask)
        self.listener.setblocking(False)

    def publish(self) -> None:
        """Take the path, from the server that this one replaces as well. Raises OSError."""
        os.rename(self._bound, self._path)
        self._bound = self._path

    def close(self) -> None:
        """Close the socket and remove its file, unless that is another server's by now."""
        self.listener.close()
        with contextlib.suppress(OSError):
            if os.stat(self._bound).st_ino == self._inode:
                os.unlink(self._bound)


@contextlib.contextmanager
def operator_socket(path: str | None, *, is_successor: bool = False) -> Iterator[OperatorSocket | None]:
    """Listen at `path` for the operator, inside the block; None: nowhere. Raises ConfigError.

    is_successor: the path belongs to the server that is replaced, until `publish` is called.
    """
    if path is None:
        yield None
        return
    with _as_config_error(path):
        _check_free(path, is_successor=is_successor)
        found = OperatorSocket(path)
    try:
        if not is_successor:
            with _as_config_error(path):
                found.publish()
        yield found
    finally:
        found.close()


@contextlib.contextmanager
def _as_config_error(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--admin-socket {path}: {error.strerror or error}") from None


def _check_free(path: str, *, is_successor: bool) -> None:
    """Raise ConfigError if the path is another file, or the socket of another server that runs."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"--admin-socket {path}: there is a file that is not a socket")
    if is_successor:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:  # of a server that has ended
            return
        except TimeoutError:  # its queue is full: it runs
            pass
    raise ConfigError(f"--admin-socket {path}: another server listens there")
