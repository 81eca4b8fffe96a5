"""A KV page outside of the device: blocks of bytes that nothing here interprets.

A page belongs to one hash. It has one block of bytes for each array of each cache group of the model: the keys and the
values of all layers for a model with one kind of attention, the vectors of all layers for latent attention. A model with
several groups has further blocks; stores, files and messages carry them without a change.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np

FORMAT_VERSION: Final = 1
"""Version of the bytes of a page, of its file and of its messages: a part of every identity."""
CHECKSUM_BYTES: Final = 16

Page = tuple[np.ndarray, ...]
"""The blocks of one page: uint8 `[num_bytes]` each, in the order of the layout."""


@dataclass(frozen=True, slots=True)
class CacheBlock:
    """One block of every page."""

    group: str
    """The cache group: its kind and its place, e.g. `full 0`."""
    name: str
    """The array within the group, e.g. `k`."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The meaning of a page's bytes. Engines exchange pages only if their layouts are equal."""

    model: str
    """A digest of everything that decides the content of a page besides its tokens: weights, dtypes, kernels, devices."""
    description: str
    """Tokens per page, dtype and dimensions of the arrays."""
    blocks: tuple[CacheBlock, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of one page."""
        return sum(block.num_bytes for block in self.blocks)

    @property
    def identity(self) -> str:
        """Return 32 hex digits that name this layout; they are equal for equal layouts only."""
        parts = (FORMAT_VERSION, self.model, self.description, self.blocks)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def views(self, row: np.ndarray) -> Page:
        """Return the blocks of a page that lies in `row`, uint8 `[num_bytes]`."""
        ends = np.cumsum([block.num_bytes for block in self.blocks]).tolist()
        return tuple(row[end - block.num_bytes : end] for block, end in zip(self.blocks, ends, strict=True))

    def new_page(self) -> Page:
        """Return a page of undefined content."""
        return self.views(np.empty(self.num_bytes, np.uint8))


def copy_page(source: Page, target: Page) -> None:
    """Copy the blocks of one page into those of another."""
    for from_block, to_block in zip(source, target, strict=True):
        to_block[:] = from_block


def checksum(blocks: Page) -> bytes:
    """Return the BLAKE2b digest of a page's bytes: it finds damage, and is no proof of origin."""
    digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
    for block in blocks:
        digest.update(np.ascontiguousarray(block).data)
    return digest.digest()
