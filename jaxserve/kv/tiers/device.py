"""The interface between the tiers and the device that computes pages and recurrent states.

An engine has one for its pages, and one for the snapshots of a model with recurrent states: there a block is a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from jaxserve.kv.tiers.page import Page, PageLayout
from jaxserve.types import BlockId


class PendingPages(Protocol):
    """Pages on their way from the device to the host."""

    def pages(self) -> list[Page]:
        """Wait for the pages, in the order of the blocks. Raises the error of the device. Any thread may call it."""
        ...


class StagedPages(Protocol):
    """Pages on their way from the host to a buffer of the device."""

    @property
    def count(self) -> int:
        """Number of pages."""
        ...

    def is_ready(self) -> bool:
        """Return True if a write would not make the device wait. Never blocks."""
        ...


StagedT_contra = TypeVar("StagedT_contra", contravariant=True)


class PageDevice(Protocol[StagedT_contra]):
    """Copies pages between the KV pool and the host. Reads, writes and steps run in the order of their calls."""

    @property
    def layout(self) -> PageLayout: ...

    @property
    def max_batch(self) -> int:
        """Pages that one call may copy."""
        ...

    def read(self, blocks: Sequence[BlockId]) -> PendingPages:
        """Start to copy pages of the pool to the host and return at once. No step under way may write to them."""
        ...

    def stage(self, pages: Sequence[Page], rank: int) -> StagedPages:
        """Start to copy pages to a buffer of a data rank; their memory is free on return. Any thread may call it."""
        ...

    def write(self, blocks: Sequence[BlockId], staged: StagedT_contra) -> None:
        """Copy staged pages into the pool, to blocks of their rank; returns at once. If it raises, all pages of the pool are lost."""
        ...
