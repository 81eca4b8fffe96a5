"""Images of a prompt, as the API process sends them to the engine."""

from __future__ import annotations

from typing import Final

import msgspec

MAX_ROPE_POSITION: Final = 1 << 30
"""Rotary positions of prompts end before it: those of generated tokens are still integers of 32 bits."""


class PromptImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An input of the image encoder, and the tokens of the prompt that its embeddings stand for."""

    start: int
    """First token."""
    num_tokens: int
    """Tokens that stand for embeddings."""
    digest: bytes
    """sha256 of the contents: images with equal digests have equal embeddings."""
    patches: bytes
    """uint8 `[P, F]`."""
    positions: bytes
    """int32 `[P, 2]`, little-endian: row and column of each patch."""
    line: int = 0
    """Embeddings between two tokens of text, which break the lines of an image; 0: there are none."""
    sources: bytes = b""
    """int32 `[N, S]`, little-endian: see `ImageInfo.num_sources`."""

    @property
    def length(self) -> int:
        """Tokens from the first to the last, with line breaks."""
        return self.num_tokens + ((self.num_tokens - 1) // self.line if self.line else 0)


class RopePositions(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rotary positions of a prompt with images in a model that has three for each token (M-RoPE)."""

    prompt: bytes
    """int32 `[3, T]`, little-endian."""
    delta: int
    """Added to the place of each generated token; neither above MAX_ROPE_POSITION nor below its negative."""
