"""KV pages and snapshots of recurrent states outside of the device: blocks of bytes that nothing here interprets.

A page belongs to one hash. It has one block of bytes for each array of each cache group of the model: the keys and the
values of all layers for a model with one kind of attention, the vectors of all layers for latent attention. A model with
several groups has further blocks; stores, files and messages carry them without a change.

A snapshot of recurrent states is stored like a page, under a name that is made from the hash of the last page before it. It has
the blocks of the state groups.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.types import BlockHash

FORMAT_VERSION: Final = 1
"""Version of the bytes of a page, of its file and of its messages: a part of every identity."""
CHECKSUM_BYTES: Final = 16
MAX_ROWS: Final = 1024
"""Rows of host memory that a snapshot takes at most: the pages of a model without attention are a few bytes."""
_HASH_BYTES: Final = 32
_SNAPSHOT_MARK: Final = b"states"

Page = tuple[np.ndarray, ...]
"""The blocks of one page or snapshot: uint8 `[num_bytes]` each, in the order of the layout."""


def snapshot_name(block_hash: BlockHash) -> BlockHash:
    """Return the name under which stores keep the snapshot of the states after the page of this hash."""
    return BlockHash(block_hash + _SNAPSHOT_MARK)


def hash_before(name: BlockHash) -> BlockHash:
    """Return the hash of the page before the snapshot of this name."""
    return BlockHash(name[:_HASH_BYTES])


def is_snapshot(name: BlockHash) -> bool:
    """Return True for the name of a snapshot: those of pages are shorter."""
    return len(name) == _HASH_BYTES + len(_SNAPSHOT_MARK)


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
    snapshot: PageLayout | None = None
    """The layout of a snapshot; None for a model without recurrent states, and in the layout of a snapshot."""

    @property
    def all(self) -> tuple[PageLayout, ...]:
        """The layouts of everything that stores keep for the model: pages and snapshots."""
        return (self,) if self.snapshot is None else (self, self.snapshot)

    def of(self, name: BlockHash) -> PageLayout:
        """Return the layout of what has this name: a page or a snapshot."""
        return self.snapshot if self.snapshot is not None and is_snapshot(name) else self

    @property
    def num_bytes(self) -> int:
        """Bytes of one page."""
        return sum(block.num_bytes for block in self.blocks)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of host memory: those of a page, or more if a snapshot would take over MAX_ROWS of them."""
        return self.num_bytes if self.snapshot is None else max(self.num_bytes, -(-self.snapshot.num_bytes // MAX_ROWS))

    @property
    def identity(self) -> str:
        """Return 32 hex digits that name this layout; they are equal for equal layouts only."""
        parts: tuple[object, ...] = (FORMAT_VERSION, self.model, self.description, self.blocks)
        parts += () if self.snapshot is None else (self.snapshot.identity,)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def views(self, row: np.ndarray) -> Page:
        """Return the blocks of a page that lies in `row`, uint8 `[num_bytes]`."""
        ends = np.cumsum([block.num_bytes for block in self.blocks]).tolist()
        return tuple(row[end - block.num_bytes : end] for block, end in zip(self.blocks, ends, strict=True))

    def new_page(self) -> Page:
        """Return a page of undefined content."""
        return self.views(np.empty(self.num_bytes, np.uint8))


def check_holds_each(flag: str, num_bytes: int, layout: PageLayout, extra_bytes: int = 0) -> None:
    """Raise ConfigError unless a store of `num_bytes`, the value of `flag`, holds a page and a snapshot.

    extra_bytes: those that it needs besides for each.
    """
    sizes = [each.num_bytes + extra_bytes for each in layout.all]
    if num_bytes < sum(sizes):
        states = f", and a snapshot of recurrent states {sizes[1]}" if len(sizes) > 1 else ""
        raise ConfigError(f"{flag} of {num_bytes} bytes is too small: one KV page takes {sizes[0]} bytes{states}")


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
