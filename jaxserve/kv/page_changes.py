"""Changes of the set of pages that a replica holds, for routers that prefer the replica that has a prompt's pages.

A page is held while its KV can be used without computing it again, on whichever tier it lies. The owner of the tiers
calls `add` when the first copy is cached and `remove` when the last one is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.types import BlockHash


class PageChanges:
    """The held pages, and what has changed since the last `take`."""

    def __init__(self) -> None:
        self._held: dict[BlockHash, None] = {}
        self._changed: dict[BlockHash, None] = {}
        self.is_kept: Callable[[BlockHash], bool] = lambda block_hash: False
        """True for a page that a tier below the device holds: it is not removed."""

    def add(self, block_hash: BlockHash) -> None:
        """Note that the replica holds this page."""
        self._held[block_hash] = self._changed[block_hash] = None

    def remove(self, block_hash: BlockHash) -> None:
        """Note that the device holds this page no longer; the replica may still have a copy."""
        if self.is_kept(block_hash):
            return
        self._held.pop(block_hash, None)
        self._changed[block_hash] = None

    def held(self) -> list[BlockHash]:
        """Return all pages that are held now, in the order in which they were added."""
        return list(self._held)

    def take(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """Return the pages added and those removed since the last call. A page that was both is in the list of its state now."""
        changed, self._changed = self._changed, {}
        return (
            [block_hash for block_hash in changed if block_hash in self._held],
            [block_hash for block_hash in changed if block_hash not in self._held],
        )
