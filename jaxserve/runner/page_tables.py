"""Page tables that stay on the device: the host sends the entries that changed.

Tables of all rows of a step would be 8.4 MB at 256 rows of 131,072 tokens with 16 tokens a page, to be filled and sent for
every step; a decode step changes one entry of every sixteenth row.

A request's tables, one per cache group with pages, stand side by side in the row of its slot. Entries after the pages
that a step needs, and entries before the window of a sliding group, may be an earlier request's: no step reads them.

Letters: X slots, M pages per request at most, G tables per request, B rows of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Array, Int

from jaxserve.scheduler.plan import NO_SLOT, StepPlan
from jaxserve.types import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class TableChanges:
    """Entries to set in the tables on the device."""

    places: np.ndarray
    """int32, row * G * M + column."""
    pages: np.ndarray
    """int32."""
    whole_rows: tuple[tuple[int, np.ndarray], ...]
    """Rows with too many changes, to be written before: the slot, and the row's entries."""


class SentTables:
    """The host's copy of the tables on the device."""

    def __init__(self, num_slots: int, max_pages: int, page_size: int, num_tables: int = 1) -> None:
        """All entries are the null page, as on the device."""
        self._sent = np.zeros((num_slots, num_tables * max_pages), np.int32)
        self._page_size = page_size
        self._max_pages = max_pages
        self._num_tables = num_tables

    def update(self, plan: StepPlan, most: int) -> TableChanges:
        """Return what the step needs and the device does not have, at most `most` single entries, and count it as sent."""
        slots = table_rows(plan)
        last = plan.num_computed_tokens + plan.num_scheduled_tokens + plan.num_steps - 2 + plan.num_ahead
        needed = np.minimum(last // self._page_size + 1, self._max_pages)[:, None, None]
        width = int(needed.max(initial=0))
        tables = self._by_group(plan.block_tables)[:, :, :width]
        sent = self._by_group(self._sent)
        is_changed = (tables != sent[slots, :, :width]) & (np.arange(width) < needed)
        if self._num_tables > 1:
            is_changed &= tables != NULL_BLOCK  # pages that a window has passed
        whole_rows = tuple(self._whole_rows(plan, slots, is_changed, most))
        # As np.nonzero, which takes several times as long for three axes.
        rows, groups, columns = np.unravel_index(np.flatnonzero(is_changed), is_changed.shape)
        pages = tables[rows, groups, columns]
        places = slots[rows] * self._sent.shape[1] + groups * self._max_pages + columns
        sent[slots[rows], groups, columns] = pages
        return TableChanges(places.astype(np.int32), pages, whole_rows)

    def _by_group(self, tables: np.ndarray) -> np.ndarray:
        """Return a view `[rows, G, M]` of tables that stand side by side."""
        return by_group(tables, self._num_tables)

    def _whole_rows(
        self, plan: StepPlan, slots: np.ndarray, is_changed: np.ndarray, most: int
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Take the rows with most changes out of `is_changed`, which is modified, until the rest are at most `most`."""
        counts = is_changed.sum((1, 2))
        left = int(counts.sum())
        for row in np.argsort(-counts, kind="stable"):
            if left <= most:
                return
            left -= int(counts[row])
            is_changed[row] = False
            entries = self._by_group(self._sent)[slots[row]]
            own = self._by_group(plan.block_tables)[row]
            entries[:, : own.shape[1]] = own
            yield int(slots[row]), entries.flatten()


def by_group(tables: np.ndarray, num_tables: int) -> np.ndarray:
    """Return a view `[rows, G, M]` of page tables `[rows, G * M]`."""
    return tables.reshape(len(tables), num_tables, -1)


def table_rows(plan: StepPlan) -> np.ndarray:
    """Return the table's row of each row of the plan: its slot; for a drafted token, which has none, its request's."""
    rows = np.arange(len(plan.slots))
    owners = np.maximum.accumulate(np.where(plan.slots == NO_SLOT, 0, rows))
    found: np.ndarray = plan.slots[owners]
    return found


def set_entries(tables: Int[Array, "X1 M"], places: Int[Array, "U"], pages: Int[Array, "U"]) -> Int[Array, "X1 M"]:
    """Set the entries at `places`. Traced; the row after the last slot takes what is padding."""
    width = tables.shape[1]
    return tables.at[places // width, places % width].set(pages)


def write_row(tables: Int[Array, "X1 M"], slot: Int[Array, ""], row: Int[Array, "M"]) -> Int[Array, "X1 M"]:
    """Overwrite a whole row. DONATES tables."""
    return tables.at[slot].set(row)
