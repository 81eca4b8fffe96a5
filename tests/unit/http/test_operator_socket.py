"""The path of the operator's socket changes hands only when a server serves."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.http.sockets.operator_socket import operator_socket


def reaches(path: Path, listener: socket.socket) -> bool:
    """Return True if a connection to the path arrives at the listener."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return False
        return True


def test_a_server_that_fails_to_follow_another_leaves_it_the_path(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with operator_socket(str(path)) as first:
        assert first is not None
        first.listener.listen()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with operator_socket(str(path), is_successor=True) as failed:
            assert failed is not None
        assert reaches(path, first.listener)
        with operator_socket(str(path), is_successor=True) as second:
            assert second is not None
            second.listener.listen()
            second.publish()
            assert reaches(path, second.listener)
            first.close()
            assert reaches(path, second.listener), "the end of the first server leaves the second one's file"
    assert list(tmp_path.iterdir()) == []


def test_the_path_of_a_server_that_runs_or_of_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with operator_socket(str(path)) as first:
        assert first is not None
        first.listener.listen()
        with pytest.raises(ConfigError, match="another server listens there"), operator_socket(str(path)):
            pass
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with operator_socket(str(path)):
        assert path.is_socket()
    path.write_text("text")
    with pytest.raises(ConfigError, match="not a socket"), operator_socket(str(path)):
        pass
    with pytest.raises(ConfigError, match="No such file"), operator_socket(str(tmp_path / "none" / "x")):
        pass
