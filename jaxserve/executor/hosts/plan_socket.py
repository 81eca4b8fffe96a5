"""The leader's end of the channel of plans. It belongs to the thread that submits steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

import zmq

from jaxserve.errors import StartupError
from jaxserve.executor.hosts.members import HostLostError, Member
from jaxserve.executor.hosts.sockets import bind, tcp_socket

_POLL_MS: Final = 200


class PlanSocket:
    """Sends frames to all workers, in order."""

    def __init__(self, address: str, setting: str) -> None:
        """Listen on a free port of `address`. Raises ConfigError in the name of `setting`."""
        self._context = zmq.Context()
        self._socket = tcp_socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a worker that is gone raises
        self._members: Sequence[Member] = ()
        self.num_bytes = 0
        """Bytes that were sent to all workers."""
        try:
            self.endpoint = bind(self._socket, address, "*", setting)
        except BaseException:
            self.close()
            raise

    def await_workers(self, members: Sequence[Member], failed: Future[StartupError], timeout_s: float) -> None:
        """Wait until every member reads plans.

        failed: the reason, once the engine cannot start. Raises StartupError then, and if a member does not connect in time.
        """
        waiting = {_identity(member): member for member in members}
        deadline = time.monotonic() + timeout_s
        while waiting:
            if self._socket.poll(_POLL_MS):
                waiting.pop(self._socket.recv_multipart()[0], None)
            elif failed.done():
                raise failed.result()
            elif time.monotonic() > deadline:
                names = ", ".join(member.name for member in waiting.values())
                raise StartupError(f"{names} cannot reach {self.endpoint}: all ports must be open between the hosts")
        self._members = members

    def broadcast(self, frame: bytes) -> None:
        """Send a plan or command to all workers. Raises HostLostError."""
        for member in self._members:
            try:
                self._socket.send_multipart([_identity(member), frame])
            except zmq.ZMQError as error:
                raise HostLostError(f"{member.name} is not connected any more") from error
            self.num_bytes += len(frame)

    def close(self) -> None:
        """Release the socket."""
        self._context.destroy(linger=0)


def _identity(member: Member) -> bytes:
    return str(member.join.rank).encode()
