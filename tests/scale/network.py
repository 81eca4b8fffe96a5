"""Hosts for tests: network namespaces on one bridge, which the test process can reach. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_NUMBERS: Final = itertools.count()
"""Numbers of the networks of this process: the kernel removes the links of one some time after the namespaces."""


@dataclass(frozen=True)
class Host:
    """One namespace with its address."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Return the command that runs `words` on this host, whose host name is its address: gloo connects to host names."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.address]
        return ["ip", "netns", "exec", self.name, *named, *words]


def can_make_hosts() -> bool:
    """Return True if this process may make network namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"jst{os.getpid() % 100000}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return made


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Make hosts that reach each other and this process, and remove them at the end."""
    number = next(_NUMBERS)
    tag, subnet = f"{os.getpid() % 100000}{chr(ord('a') + number % 26)}", (os.getpid() + 37 * number) % 200 + 20
    bridge = f"jsb{tag}"
    made = [Host(f"jsh{tag}-{index}", f"10.211.{subnet}.{index + 1}") for index in range(count)]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"10.211.{subnet}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for index, host in enumerate(made):
            link = f"jsv{tag}{index}"
            _ip("netns", "add", host.name)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("link", "set", link, "master", bridge)
            _ip("link", "set", link, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.name, "link", "set", device, "up")
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", bridge], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
