"""The messages of the process that decodes images, as MessagePack."""

from __future__ import annotations

from typing import Final

import msgspec

from jaxserve.config import ImagesConfig

MODULE: Final = "jaxserve.frontend.images.decode_process"


class DecodeSpec(msgspec.Struct, frozen=True, array_like=True):
    """Everything the process needs to start."""

    model_path: str
    mmproj: str | None
    """GGUF file with the image encoder of a GGUF text model."""
    config: ImagesConfig
    max_patches: int
    """Patches of one item that the engine can encode."""
    has_videos: bool = False
    """True if videos are served."""


class DecodeJob(msgspec.Struct, frozen=True, array_like=True):
    """A file of an image or of a video, to decode and to prepare for the model."""

    data: bytes
    low_detail: bool = False
    is_alone: bool = True
    """True if the prompt has no other image."""
    is_video: bool = False


class PreparedItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One input of the image encoder: an image, one tile of it, or a group of frames of a video."""

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
    """sha256 over shapes, patches, positions and the time: equal digests mean equal embeddings at equal rotary positions."""
    line: int = 0
    """Embeddings of a row, if prompts have a line break between rows; 0: they have none."""
    sources: bytes = b""
    """int32 `[N, S]`, little-endian: see `VisionConfig.num_sources`."""
    time: int | None = None
    """See `EncoderItem.time`."""


class PreparedImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image or a video as the model takes it."""

    items: list[PreparedItem]
    text: str
    """The text that stands in the prompt for the image: image tokens of all items in their order, and marks around them."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(len(item.patches) + len(item.positions) + len(item.sources) for item in self.items)


class DecodeReply(msgspec.Struct, frozen=True, array_like=True):
    """The result of a job."""

    error: str | None
    """The reason why the image is rejected, as the rest of a sentence about its field."""
    image: PreparedImage | None = None
