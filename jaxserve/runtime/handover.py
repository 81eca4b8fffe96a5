"""The hand-over of a running server's port to another process (`jaxserve upgrade`).

A server that is ready listens on a Unix socket in its private directory. A process that wants its port connects, and gets
the listening sockets themselves (SCM_RIGHTS): both processes then have the same queues of connections, so none is refused
or lost, whichever process ends first. Messages are JSON, one per line:

running server      Offer with the listening sockets, or Refusal
the next process    Suspend: serve what has begun, then end the engine (`--after-drain`)
running server      Suspended: the device is free
the next process    TakeOver: it accepts connections now
end of file         from the next process before TakeOver: it failed, the running server goes on serving;
                    from the running server: it has ended
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from jaxserve import __version__
from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.http.listener import resolve_address
from jaxserve.ipc.address import FOLDER_PREFIX
from jaxserve.runtime.tasks import running

_log = logging.getLogger(__name__)

_BATCH: Final = 128
"""Sockets per message; the kernel takes at most 253."""
_MAX_LINE_BYTES: Final = 1 << 16
_ANSWER_TIMEOUT_S: Final = 10.0
"""Time in which a running server must answer with its sockets."""


class Offer(msgspec.Struct, frozen=True, tag_field="message", tag="offer"):
    """The running server, whose listening sockets follow, at most `_BATCH` of them with one byte."""

    pid: int
    version: str
    num_listeners: int


class Refusal(msgspec.Struct, frozen=True, tag_field="message", tag="refusal"):
    """The running server keeps its port."""

    reason: str


class Suspend(msgspec.Struct, frozen=True, tag_field="message", tag="suspend"):
    """Request to end the engine once the running requests have ended."""


class Suspended(msgspec.Struct, frozen=True, tag_field="message", tag="suspended"):
    """The engine has ended. New connections wait in the kernel's queues."""


class TakeOver(msgspec.Struct, frozen=True, tag_field="message", tag="take_over"):
    """The next process accepts connections."""

    receivers: list[str]
    """Unix sockets that take idle connections, one per API process of the next server (`http.sockets.transfer`)."""


Message: TypeAlias = Offer | Refusal | Suspend | Suspended | TakeOver
_MESSAGE: Final[msgspec.json.Decoder[Message]] = msgspec.json.Decoder(Message)

Step = Callable[[], Awaitable[None]]


class HandOver:
    """The running server's side: offers its port to one process at a time, or refuses it to all."""

    def __init__(
        self, listeners: Sequence[socket.socket], suspend: Step, resume: Step, refusal: str | None = None
    ) -> None:
        """suspend, resume: stop serving and free the device; serve again after that. refusal: why no process gets the port."""
        self._listeners = listeners
        self._suspend = suspend
        self._resume = resume
        self._refusal = refusal
        self._is_busy = False
        self._path: Path | None = None
        self.receivers: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        """Set when another process serves: where it takes idle connections."""

    @contextlib.asynccontextmanager
    async def offering(self, folder: Path) -> AsyncIterator[None]:
        """Offer the port inside the block. folder: the server's private directory.

        A server that cannot do so logs why, and serves.
        """
        path = _path(folder, self._listeners[0].getsockname())
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(str(path))
            except OSError as error:
                _log.warning("`jaxserve upgrade` cannot replace this server: %s: %s", path, error.strerror or error)
                yield
                return
            self._path = path
            listener.listen()
            listener.setblocking(False)
            try:
                async with running(self._answer_all(listener)):
                    yield
            finally:
                path.unlink(missing_ok=True)

    async def _answer_all(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        talks: set[asyncio.Task[None]] = set()
        try:
            while True:
                channel, _ = await loop.sock_accept(listener)
                talks.add(asyncio.create_task(self._talk(channel)))
        finally:
            for talk in talks:
                talk.cancel()
            await asyncio.gather(*talks, return_exceptions=True)

    async def _talk(self, channel: socket.socket) -> None:
        """Talk to one process that asks for the port, to its end or this process's."""
        with channel, contextlib.suppress(OSError):  # it was killed
            busy = "another process is about to replace it, or has done so" if self._is_busy else None
            if refusal := self._refusal or busy:
                await _send(channel, Refusal(refusal))
                return
            self._is_busy = True
            try:
                await self._offer(channel)
            finally:
                self._is_busy = self.receivers.done()

    async def _offer(self, channel: socket.socket) -> None:
        _log.info("another process prepares to replace this one")
        await _send(channel, Offer(os.getpid(), __version__, len(self._listeners)))
        for first in range(0, len(self._listeners), _BATCH):
            batch = self._listeners[first : first + _BATCH]
            socket.send_fds(channel, [b"l"], [listener.fileno() for listener in batch])
        suspended = False
        try:
            while (message := await _receive(channel)) is not None:
                if isinstance(message, Suspend):
                    suspended = True
                    await self._suspend()
                    await _send(channel, Suspended())
                elif isinstance(message, TakeOver):
                    self.receivers.set_result(message.receivers)
                    assert self._path is not None, "the process came through it"
                    self._path.unlink(missing_ok=True)  # the next one is to find the server that serves
                    await asyncio.Event().wait()  # the end of this process closes the channel
        finally:
            if not self.receivers.done():
                _log.warning("the process that was to replace this one has ended: this one goes on serving")
                if suspended:
                    await self._resume()


@dataclass(frozen=True, slots=True)
class Predecessor:
    """The running server, whose listening sockets this process has."""

    pid: int
    version: str
    listeners: list[socket.socket]
    _channel: socket.socket

    async def suspend(self) -> None:
        """Wait until its requests have ended and its engine with them. Returns at once if it has ended."""
        _log.info("waiting until process %d has finished its requests and ended its engine", self.pid)
        with contextlib.suppress(OSError):
            await _send(self._channel, Suspend())
            await _receive(self._channel)

    async def take_over(self, receivers: Sequence[str]) -> None:
        """Inform it that this process accepts connections. receivers: where idle connections are taken."""
        with contextlib.suppress(OSError):  # it has ended: its port is ours in any case
            await _send(self._channel, TakeOver(list(receivers)))


@contextlib.contextmanager
def predecessor(server: ServerConfig) -> Iterator[Predecessor]:
    """Yield the server that runs at the address of `server`, after it has passed its sockets. Raises ConfigError."""
    if server.port == 0:
        raise ConfigError("--port 0: `jaxserve upgrade` needs the port of the running server")
    address = resolve_address(server.host, server.port)[1]
    try:
        parent = Path(server.uds_dir or tempfile.gettempdir())
    except FileNotFoundError as error:  # every temporary folder is full
        raise ConfigError(f"cannot look for the running server: {error.strerror} (--uds-dir)") from error
    with contextlib.ExitStack() as sockets:
        for path in sorted(parent.glob(f"{FOLDER_PREFIX}*/{_path(Path(), address)}")):
            if not _is_private(path.parent):
                continue
            channel = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            channel.settimeout(_ANSWER_TIMEOUT_S)
            try:
                channel.connect(str(path))
                found = _accept_offer(channel)
            except OSError:  # its server was killed
                continue
            for listener in found.listeners:
                sockets.enter_context(listener)
            yield found
            return
        raise ConfigError(
            f"no server to replace on {server.host} port {server.port} (--host, --port, --uds-dir); "
            "`jaxserve serve` starts one, and it can be replaced once it is ready"
        )


def share_listeners(listeners: Sequence[socket.socket], count: int) -> list[list[socket.socket]]:
    """Return the sockets on which each of `count` API processes listens: every socket has a process, every process a socket."""
    return [list(listeners[index::count]) or [listeners[index % len(listeners)]] for index in range(count)]


def _accept_offer(channel: socket.socket) -> Predecessor:
    """Raises OSError if the server is gone, ConfigError if it refuses."""
    line = b""
    while not line.endswith(b"\n"):
        part = channel.recv(1)  # the sockets come with the bytes after the line
        if not part:
            raise ConnectionResetError("the server hung up")
        line += part
    offer = _MESSAGE.decode(line)
    if isinstance(offer, Refusal):
        raise ConfigError(f"the running server cannot be replaced now: {offer.reason}")
    assert isinstance(offer, Offer), "the first message is an offer or a refusal"
    listeners: list[socket.socket] = []
    while len(listeners) < offer.num_listeners:
        data, descriptors, _, _ = socket.recv_fds(channel, 1, _BATCH)
        if not data:
            raise ConnectionResetError("the server hung up")
        listeners += [socket.socket(fileno=descriptor) for descriptor in descriptors]
    for listener in listeners:
        listener.setblocking(False)
    channel.setblocking(False)
    return Predecessor(offer.pid, offer.version, listeners, channel)


def _path(folder: Path, address: tuple[str, int]) -> Path:
    host, port = address[:2]
    return folder / f"port-{host}-{port}.sock"


def _is_private(folder: Path) -> bool:
    status = folder.stat()
    return status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077


async def _send(channel: socket.socket, message: Message) -> None:
    await asyncio.get_running_loop().sock_sendall(channel, msgspec.json.encode(message) + b"\n")


async def _receive(channel: socket.socket) -> Message | None:
    """Return the next message, None at the end of file. Each side waits for an answer before it sends again."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES:
        part = await asyncio.get_running_loop().sock_recv(channel, _MAX_LINE_BYTES)
        if not part:
            return None
        line += part
    return _MESSAGE.decode(line)
