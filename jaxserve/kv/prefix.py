"""The part of a prompt that other requests have computed, and that the device does not have any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.types import BlockHash


@dataclass(slots=True)
class MissingPrefix:
    """The pages that a request could share on a data rank, of which some, or the snapshot of recurrent states, are missing."""

    hashes: Sequence[BlockHash]
    """All pages that it could share."""
    num_cached: int
    """Leading pages that are in the prefix cache."""
    rank: int = 0
    ends: Sequence[int] | None = None
    """Numbers of pages, longest first, after which a snapshot would let the request share more than now. None: the model has no
    recurrent states, and a prefix may end after any page."""
    num_usable: int = 0
    """Pages that the request could share now, in a model with recurrent states."""
    kept_ends: frozenset[int] = frozenset()
    """The `ends` whose snapshot is on the device."""
    num_found: int = 0
    """Leading pages that the device or a store has; set by those who look."""

    @property
    def longest(self) -> int:
        """The most pages that a fetch can make the request share."""
        return len(self.hashes) if self.ends is None else max(self.ends, default=0)

    def num_saved(self, end: int) -> int:
        """Return the pages that the request need not compute if it shares `end` of them."""
        return end - (self.num_cached if self.ends is None else self.num_usable)

    @property
    def next_hash(self) -> BlockHash:
        """The hash of the first page that is not cached; of the last one if only a snapshot is missing."""
        return self.hashes[min(self.num_cached, len(self.hashes) - 1)]
