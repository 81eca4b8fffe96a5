"""The interface of a tier: put, get, find and count pages and snapshots by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from jaxserve.kv.tiers.page import Page
from jaxserve.types import BlockHash


class PageStore(Protocol):
    """Pages by their hash, and snapshots of recurrent states by `snapshot_name`. All methods may be called from any thread. What
    has a name never changes."""

    @property
    def tier(self) -> str:
        """Name of the tier in metrics: `host`, `disk` or `peer`."""
        ...

    def num_leading(self, names: Sequence[BlockHash]) -> int:
        """Return how many of these are here, counted from the first up to the first that is not."""
        ...

    def find_first(self, names: Sequence[BlockHash]) -> int | None:
        """Return the index of the first of these that is here; None if none is."""
        ...

    def get(self, names: Sequence[BlockHash], pages: Sequence[Page]) -> int:
        """Copy what has these names into `pages`, up to the first that is not here; returns how many."""
        ...


class OwnStore(PageStore, Protocol):
    """A store of this engine. It evicts the least recently used: what was stored or touched longest ago."""

    @property
    def max_pages(self) -> int:
        """The most pages that it holds."""
        ...

    def touch(self, names: Collection[BlockHash]) -> list[BlockHash]:
        """Count these as used, the last one as the most recently used. Returns those that are not here."""
        ...

    def put(self, name: BlockHash, page: Page) -> None:
        """Store a copy. Does nothing if the name is known."""
        ...

    def clear(self) -> None:
        """Forget every page."""
        ...

    def close(self) -> None:
        """Release memory, files and threads."""
        ...


def leading_tiers(stores: Sequence[PageStore], hashes: Sequence[BlockHash]) -> list[str]:
    """Return the tier of each page from the first on, up to the first page that no store has."""
    tiers: list[str] = []
    while len(tiers) < len(hashes):
        for store in stores:
            count = store.num_leading(hashes[len(tiers) :])
            if count:
                tiers += [store.tier] * count
                break
        else:
            break
    return tiers
