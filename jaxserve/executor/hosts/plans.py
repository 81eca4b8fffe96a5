"""Step plans and commands as frames: what the leader broadcasts before it submits a step itself.

FRAME    one byte that names the kind, then MessagePack
ARRAYS   (dtype, shape, bytes)

Workers need no request ids, so a plan crosses with empty ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, Literal

import msgspec
import numpy as np

from jaxserve.scheduler.plan import EmbedPlan, StepPlan
from jaxserve.types import RequestId

HostCommand = Literal["start_profile", "stop_profile"]
Order = StepPlan | EmbedPlan | HostCommand
"""One frame."""


def encode_order(order: Order) -> bytes:
    """Return the frame of a plan or of an operator's command."""
    if isinstance(order, str):
        return b"c" + _ENCODER.encode(order)
    bare = replace(order, request_ids=(RequestId(""),) * len(order.request_ids))
    return (b"t" if isinstance(bare, EmbedPlan) else b"s") + _ENCODER.encode(bare)


def decode_order(frame: bytes) -> Order:
    """Return the plan or command of a frame; arrays are read-only. Raises msgspec.DecodeError."""
    decoder = _DECODERS.get(frame[:1])
    if decoder is None:
        raise msgspec.DecodeError(f"no kind of order: {frame[:1]!r}")
    order: Order = decoder.decode(memoryview(frame)[1:])
    return order


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise TypeError(f"plans have no {type(value).__name__}")


def _to_array(kind: type, value: Any) -> Any:
    dtype, shape, content = value
    return np.frombuffer(content, np.dtype(dtype)).reshape(shape)


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_DECODERS: Final[dict[bytes, msgspec.msgpack.Decoder[Any]]] = {
    b"s": msgspec.msgpack.Decoder(StepPlan, dec_hook=_to_array),
    b"t": msgspec.msgpack.Decoder(EmbedPlan, dec_hook=_to_array),
    b"c": msgspec.msgpack.Decoder(HostCommand),
}
