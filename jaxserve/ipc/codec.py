"""Encodes messages as frames and back: MessagePack, typed, bounded.

A frame that is too long, not MessagePack, of an unknown type or with a field out of range raises `ProtocolError` and no
other error, so that no frame can end the process that receives it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from jaxserve.errors import JaxserveError
from jaxserve.ipc.messages import AddRequest, FromEngine, ToEngine
from jaxserve.types import RequestId

MAX_FRAME_BYTES: Final = 64 << 20
"""A prompt of a million tokens takes 5 MB, a step of 4,096 rows with 20 log-probabilities each 2 MB."""

_TO_ENGINE: Final[msgspec.msgpack.Decoder[ToEngine]] = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE: Final[msgspec.msgpack.Decoder[FromEngine]] = msgspec.msgpack.Decoder(FromEngine)


class ProtocolError(JaxserveError):
    """A frame that is no message.

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
