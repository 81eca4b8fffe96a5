"""The interface of a tier: put, get and count pages by hash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxserve.kv.tiers.page import Page
from jaxserve.types import BlockHash


class PageStore(Protocol):
    """Pages by hash. All methods may be called from any thread. A page of a hash never changes."""

    @property
    def tier(self) -> str:
        """Name of the tier in metrics: `host`, `disk` or `peer`."""
        ...

    def num_leading(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many pages are here, counted from the first up to the first that is not."""
        ...

    def get(self, hashes: Sequence[BlockHash], pages: Sequence[Page]) -> int:
        """Copy the pages of `hashes` into `pages`, up to the first that is not here; returns how many."""
        ...

    def put(self, block_hash: BlockHash, page: Page) -> None:
        """Store a copy of a page. Does nothing if the hash is known."""
        ...

    def clear(self) -> None:
        """Forget every page."""
        ...

    def close(self) -> None:
        """Release files, sockets and threads."""
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
