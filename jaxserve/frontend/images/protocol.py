"""The messages of the process that decodes images. A frame is its length, 8 bytes little-endian, and MessagePack."""

from __future__ import annotations

from typing import Final

import msgspec

from jaxserve.config import ImagesConfig

MODULE: Final = "jaxserve.frontend.images.decode_process"
LENGTH_BYTES: Final = 8


class DecodeSpec(msgspec.Struct, frozen=True, array_like=True):
    """The first frame: everything the process needs to start."""

    model_path: str
    config: ImagesConfig
    max_patches: int
    """Patches of one item that the engine can encode."""


class DecodeJob(msgspec.Struct, frozen=True, array_like=True):
    """An image file to decode and to prepare for the model."""

    number: int
    data: bytes
    low_detail: bool = False


class PreparedItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One input of the image encoder: an image, or one tile of it."""

    num_tokens: int
    """Prompt tokens whose embeddings the encoder makes."""
    grid: tuple[int, int]
    """Rows and columns of patches."""
    num_patches: int
    patches: bytes
    """uint8 `[P, F]`."""
    positions: bytes
    """int32 `[P, 2]`, little-endian."""
    digest: bytes
    """sha256 over shapes, patches and positions: equal digests mean equal embeddings."""


class PreparedImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image as the model takes it."""

    items: list[PreparedItem]
    text: str
    """The text that stands in the prompt for the image: image tokens of all items in their order, and marks around them."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(len(item.patches) + len(item.positions) for item in self.items)


class DecodeReply(msgspec.Struct, frozen=True, array_like=True):
    """The result of a job. Replies come in the order in which jobs end."""

    number: int
    error: str | None
    """The reason why the image is rejected, as the rest of a sentence about its field."""
    image: PreparedImage | None = None


def framed(message: msgspec.Struct) -> bytes:
    """Return the frame of a message."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


class Frames:
    """Cuts a stream of bytes into the contents of frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def push(self, data: bytes) -> list[bytes]:
        """Return the contents of the frames that `data` completes."""
        self._pending += data
        found, start = [], 0
        while len(self._pending) >= start + LENGTH_BYTES:
            end = start + LENGTH_BYTES + int.from_bytes(self._pending[start : start + LENGTH_BYTES], "little")
            if len(self._pending) < end:
                break
            found.append(bytes(self._pending[start + LENGTH_BYTES : end]))
            start = end
        del self._pending[:start]
        return found
