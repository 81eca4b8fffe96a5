"""Decides how far a fetch brings back a prefix: which pages, and the snapshot of recurrent states after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.kv.prefix import MissingPrefix
from jaxserve.kv.tiers.page import PageLayout, snapshot_name
from jaxserve.kv.tiers.store import PageStore, leading_tiers
from jaxserve.types import BlockHash


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """The extent of one fetch."""

    end: int
    """Pages of the prefix that the device has afterwards."""
    tiers: tuple[str, ...]
    """The tier of each page that is fetched, those before `end`."""
    snapshot_tier: str | None = None
    """The tier of the snapshot at `end`; None if none is fetched."""

    def costs(self, layout: PageLayout) -> list[str]:
        """Return the tier of each page, and that of the snapshot as often as it has the bytes of a page."""
        snapshot = [] if self.snapshot_tier is None else [self.snapshot_tier] * snapshot_pages(layout)
        return [*self.tiers, *snapshot]


def snapshot_pages(layout: PageLayout) -> int:
    """Return the number of rows, mostly pages, that take as many bytes as a snapshot."""
    return 0 if layout.snapshot is None else -(-layout.snapshot.num_bytes // layout.row_bytes)


def plan_fetch(stores: Sequence[PageStore], missing: MissingPrefix) -> FetchPlan | None:
    """Return the longest fetch that `stores` allow; None if they have nothing that helps. Notes in `missing` how far pages reach."""
    tiers = leading_tiers(stores, missing.hashes[missing.num_cached :])
    missing.num_found = missing.num_cached + len(tiers)
    if missing.ends is None:
        return FetchPlan(missing.num_found, tuple(tiers)) if tiers else None
    ends = [end for end in missing.ends if end <= missing.num_found]
    end, tier = next((end for end in ends if end in missing.kept_ends), 0), None
    ends = [longer for longer in ends if longer > end]
    for store in stores:
        index = store.find_first(_names(missing.hashes, ends)) if ends else None
        if index is not None:
            end, tier, ends = ends[index], store.tier, ends[:index]
    return FetchPlan(end, tuple(tiers[: max(0, end - missing.num_cached)]), tier) if end else None


def _names(hashes: Sequence[BlockHash], ends: Sequence[int]) -> list[BlockHash]:
    """Return the names of the snapshots after these numbers of pages."""
    return [snapshot_name(hashes[end - 1]) for end in ends]
