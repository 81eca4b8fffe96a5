"""Reports to systemd that the server is ready, stops, or runs as another process (sd_notify(3))."""

from __future__ import annotations

import contextlib
import socket

from jaxserve.runtime.environment import notify_socket


def notify(state: str) -> None:
    """Send `state`, for example `READY=1`, to the service manager, if one has asked for it by NOTIFY_SOCKET."""
    path = notify_socket()
    if path is None:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto(state.encode(), address)  # a manager that does not listen is no reason to fail
