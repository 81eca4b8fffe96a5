"""Embeddings that clients give in place of tokens, as they cross to the engine."""

from __future__ import annotations

import msgspec


class PromptEmbeds(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Embeddings of a part of a prompt that the client gave in place of tokens."""

    start: int
    """First token."""
    num_tokens: int
    digest: bytes
    """sha256 of the values."""
    values: bytes
    """float32 `[num_tokens, D]`, little-endian."""


class PromptEmbedsInfo(msgspec.Struct, frozen=True, array_like=True):
    """Sizes of embeddings that clients may give in place of tokens."""

    width: int
    """Numbers of an embedding."""
    piece_tokens: int
    """Most tokens of a `PromptEmbeds`."""
    cache_rows: int
    """Embeddings that the device keeps."""
