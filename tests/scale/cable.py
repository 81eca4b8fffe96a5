"""Two hosts on one machine: the calling thread and a process, each in a network namespace of its own, joined by a cable."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.e2e.http_server import command_of, until

_NEW_NETWORK = 0x40000000
_NEW_NAMES = 0x04000000
_LIBC = ctypes.CDLL(None, use_errno=True)
_CABLE = "jaxserve0"


@dataclass(frozen=True, slots=True)
class TwoHosts:
    """The near end is the calling thread's, with every process it starts; the far end is that of `holder`."""

    holder: int
    near: str = "10.231.7.1"
    far: str = "10.231.7.2"

    def far_command(self, command: list[str]) -> list[str]:
        """Return a command that runs `command` at the far end."""
        return ["nsenter", "--target", str(self.holder), "--net", "--uts", "--", *command]

    def cut(self) -> None:
        """Take the cable down: no packet crosses, and no connection is closed."""
        _run("ip", "link", "set", _CABLE, "down")

    def mend(self) -> None:
        """Bring the cable up again."""
        _run("ip", "link", "set", _CABLE, "up")


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Move the calling thread into a new network and join it with another. Skips the test where this is not allowed.

    Hosts are named by their addresses, by which gloo finds them.
    """
    before = [os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts")]
    try:
        if _LIBC.unshare(_NEW_NETWORK | _NEW_NAMES):
            pytest.skip(f"no network namespaces here: {os.strerror(ctypes.get_errno())}")
        with subprocess.Popen(["unshare", "--net", "--uts", "cat"], stdin=subprocess.PIPE) as holder:
            try:
                network = TwoHosts(_settled(holder.pid))
                _connect(network)
                yield network
            finally:
                holder.kill()
    finally:
        for descriptor in before:
            _LIBC.setns(descriptor, 0)
            os.close(descriptor)


def _settled(pid: int) -> int:
    """Return `pid` once its process has its own network."""
    until(lambda: command_of(pid) == b"cat\0", "no second network")
    return pid


def _connect(network: TwoHosts) -> None:
    far = network.far_command([])
    _LIBC.sethostname(network.near.encode(), len(network.near))
    _run(*far, "hostname", network.far)
    _run("ip", "link", "add", _CABLE, "type", "veth", "peer", "name", _CABLE, "netns", str(network.holder))
    for prefix, address in (((), network.near), (tuple(far), network.far)):
        _run(*prefix, "ip", "link", "set", "lo", "up")
        _run(*prefix, "ip", "address", "add", f"{address}/30", "dev", _CABLE)
        _run(*prefix, "ip", "link", "set", _CABLE, "up")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
