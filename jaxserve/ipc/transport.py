"""The socket pair between API processes and the engine: ZeroMQ over a private Unix socket.

`EngineSocket` is the engine's end: blocking, one thread, any number of clients. `ClientSocket` is an
API process's end: asyncio. No message is dropped while both run (no high-water mark). If a client closes its end,
the engine learns which requests have lost their client.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, NewType

import msgspec
import zmq
import zmq.asyncio

from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.ipc.address import private_path
from jaxserve.ipc.messages import AddRequest, FromEngine, Heartbeat, RequestOutput, StepOutputs, ToEngine
from jaxserve.types import RequestId

MAX_FRAME_BYTES: Final = 256 << 20
"""A prompt of a million tokens takes 5 MB, a step of 4,096 rows with 20 log-probabilities each 2 MB, an image of a million
pixels 3 MB."""
MAX_IMAGE_BYTES: Final = MAX_FRAME_BYTES - (64 << 20)
"""Bytes of the images of one request."""

_TO_ENGINE: Final[msgspec.msgpack.Decoder[ToEngine]] = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE: Final[msgspec.msgpack.Decoder[FromEngine]] = msgspec.msgpack.Decoder(FromEngine)


class ProtocolError(JaxserveError):
    """A frame that is no message: too long, not MessagePack, of an unknown type or with a field out of range.

    `request_id` is set if the frame is a damaged `AddRequest` with a readable id, so that the request can be answered.
    """

    def __init__(self, message: str, request_id: RequestId | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


def encode(message: ToEngine | FromEngine) -> bytes:
    """Return the frame of `message`. Raises ProtocolError if it exceeds MAX_FRAME_BYTES."""
    frame = msgspec.msgpack.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"{type(message).__name__} takes {len(frame)} bytes, the limit is {MAX_FRAME_BYTES}")
    return frame


def decode_to_engine(frame: bytes) -> ToEngine:
    """Return the message in a frame that the engine received."""
    try:
        return _TO_ENGINE.decode(_bounded(frame))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message to the engine: {error}", _request_id_of(frame)) from error


def decode_from_engine(frame: bytes) -> FromEngine:
    """Return the message in a frame that the engine sent."""
    try:
        return _FROM_ENGINE.decode(_bounded(frame))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message from the engine: {error}") from error


def _bounded(frame: bytes) -> bytes:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes, the limit is {MAX_FRAME_BYTES}")
    return frame


def _request_id_of(frame: bytes) -> RequestId | None:
    """Return the id in a damaged AddRequest, `[tag, id, ...]`."""
    try:
        found: Any = msgspec.msgpack.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if isinstance(found, list) and len(found) > 1 and found[0] == AddRequest.__name__ and isinstance(found[1], str):
        return RequestId(found[1])
    return None


def _frames(outputs: list[RequestOutput]) -> list[list[RequestOutput]]:
    """Divide outputs so that the experts of each part take no more than half of a frame, or the part is one output."""
    frames: list[list[RequestOutput]] = [[]]
    num_bytes = 0
    for output in outputs:
        size = len(output.routed_experts or b"")
        num_bytes += size
        if num_bytes > MAX_FRAME_BYTES // 2 and frames[-1]:
            frames.append([])
            num_bytes = size
        frames[-1].append(output)
    return frames


ClientId = NewType("ClientId", bytes)
"""The identity ZeroMQ gives a connection."""

QUIET_S: Final = 1.0
"""Longest time without a message to a client while steps are done."""


class EngineSocket:
    """The engine's end. All methods belong to one thread.

    A request belongs to the client that claimed it until its terminal message is sent. Statistics go to one client
    only (the one known longest), so that counters are counted once. Every client gets a message every QUIET_S, even if
    all of its requests wait.
    """

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        path = private_path(address)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a client that is gone raises
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen on {address}: {error.strerror}") from error
        path.chmod(0o600)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._clock = clock
        self._clients: dict[ClientId, float] = {}
        """Time of the last message to each client."""
        self._owners: dict[RequestId, ClientId] = {}

    @property
    def has_clients(self) -> bool:
        return bool(self._clients)

    def wake_on(self, descriptor: int) -> None:
        """Let `receive` return early when `descriptor` becomes readable."""
        self._poller.register(descriptor, zmq.POLLIN)

    def receive(self, timeout_s: float) -> list[tuple[ClientId, ToEngine | ProtocolError]]:
        """Return all messages that have arrived, oldest first; waits up to `timeout_s` if there are none."""
        arrivals = self._drain()
        if not arrivals and timeout_s > 0:
            self._poller.poll(int(timeout_s * 1000))
            arrivals = self._drain()
        return arrivals

    def claim(self, request_id: RequestId, client: ClientId) -> None:
        """Send outputs of `request_id` to `client` from now on."""
        self._owners[request_id] = client

    def owner(self, request_id: RequestId) -> ClientId | None:
        """Return the client of this request."""
        return self._owners.get(request_id)

    def send(self, client: ClientId, message: FromEngine) -> list[RequestId]:
        """Send to one client. If it is gone, forget it and return its requests."""
        try:
            self._socket.send_multipart([client, encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return self._forget(client)
        self._clients[client] = self._clock()
        return []

    def broadcast(self, message: FromEngine) -> list[RequestId]:
        """Send to every client; returns requests whose client is gone."""
        stats_client = next(iter(self._clients), None)
        orphans = []
        for client in list(self._clients):
            has_stats = client == stats_client or not isinstance(message, Heartbeat)
            orphans += self.send(client, message if has_stats else Heartbeat())
        return orphans

    def publish(self, step: StepOutputs) -> list[RequestId]:
        """Send each client the outputs of its requests; returns requests whose client is gone."""
        shares: dict[ClientId, list[RequestOutput]] = {}
        for output in step.outputs:
            owner = self._owners.get(output.request_id)
            if owner is not None:
                shares.setdefault(owner, []).append(output)
                if output.finish_reason is not None:
                    del self._owners[output.request_id]
        stats_client = next(iter(self._clients), None)
        if stats_client is not None and step.stats is not None:
            shares.setdefault(stats_client, [])
        silent_since = self._clock() - QUIET_S
        for client, last_sent in self._clients.items():
            if last_sent < silent_since:
                shares.setdefault(client, [])
        orphans = []
        for client, outputs in shares.items():
            first, *more = _frames(outputs)
            orphans += self.send(client, StepOutputs(first, step.stats if client == stats_client else None))
            for rest in more:
                orphans += self.send(client, StepOutputs(rest))
        return orphans

    def close(self, linger_s: float = 0.0) -> None:
        """Close; messages that are not delivered yet get up to `linger_s`."""
        self._socket.close(linger=int(linger_s * 1000))
        self._context.term()

    def _drain(self) -> list[tuple[ClientId, ToEngine | ProtocolError]]:
        arrivals: list[tuple[ClientId, ToEngine | ProtocolError]] = []
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return arrivals
            client = ClientId(parts[0])
            self._clients.setdefault(client, self._clock())
            try:
                arrivals.append((client, decode_to_engine(b"".join(parts[1:]))))
            except ProtocolError as error:
                arrivals.append((client, error))

    def _forget(self, client: ClientId) -> list[RequestId]:
        self._clients.pop(client, None)
        orphans = [request_id for request_id, owner in self._owners.items() if owner == client]
        for request_id in orphans:
            del self._owners[request_id]
        return orphans


class ClientSocket:
    """An API process's end. Connecting does not wait for the engine: messages wait until it listens."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.connect(address)

    async def send(self, message: ToEngine) -> None:
        """Send a message; does not wait for the engine to read it."""
        await self._socket.send(encode(message))

    async def receive(self) -> FromEngine:
        """Return the next message. Raises ProtocolError for an invalid frame; the connection stays usable."""
        parts = await self._socket.recv_multipart()
        return decode_from_engine(b"".join(parts))

    def close(self) -> None:
        """Close at once; a waiting `receive` is cancelled."""
        self._socket.close(linger=0)
        self._context.term()
