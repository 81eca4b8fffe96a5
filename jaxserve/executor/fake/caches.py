"""The caches of the fake model beside its first one: pages of windows, and slots of recurrent states.

They hold what can be checked: tokens in pages, and in a slot the number of tokens of a text with the sum that
`models.next_token` makes of them. A wrong page or slot raises `PoisonError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from jaxserve.scheduler.plan import StepPlan
from jaxserve.types import NULL_BLOCK

POISON: Final = -1
"""Content of places that hold nothing."""


class PoisonError(Exception):
    """A slot was read that holds nothing."""


class FakeWindow:
    """The pages of one window."""

    def __init__(self, window: int, num_blocks: int, block_size: int, table: int, num_tables: int) -> None:
        """table: number of its page table, of `num_tables` in a plan's rows."""
        self.pool = np.full((num_blocks, block_size), POISON, np.int64)
        self._window = window
        self._table = table
        self._num_tables = num_tables

    def write(self, plan: StepPlan, row: int, first: int, tokens: Sequence[int] | np.ndarray) -> None:
        """Write a row's new tokens, the first one at position `first`."""
        own = self._own(plan, row)
        for position, token in enumerate(tokens, first):
            page, offset = divmod(position, self.pool.shape[1])
            if own[page] == NULL_BLOCK:
                raise PoisonError(f"{plan.request_ids[row]} has no page of a window for position {position}")
            self.pool[own[page], offset] = token

    def check(self, plan: StepPlan, row: int, first: int, past: np.ndarray) -> None:
        """Raise PoisonError if the pages do not hold the last tokens that a query at position `first` attends to."""
        oldest, size = max(0, first - self._window + 1), self.pool.shape[1]
        start = oldest // size
        held = self.pool[self._own(plan, row)[start : -(-len(past) // size)]].reshape(-1)
        if not np.array_equal(held[oldest - start * size : len(past) - start * size], past[oldest:]):
            raise PoisonError(f"{plan.request_ids[row]} reads other tokens in its window: {held.tolist()}")

    def _own(self, plan: StepPlan, row: int) -> np.ndarray:
        own: np.ndarray = plan.block_tables[row].reshape(self._num_tables, -1)[self._table]
        return own


class FakeStates:
    """Slots of recurrent states: numbers of tokens, and their sums."""

    def __init__(self, num_slots: int, num_ranks: int = 1) -> None:
        """num_slots: those of all data ranks, the first of each has zeros."""
        self._size = num_slots // num_ranks
        self.slots = np.empty((num_slots, 2), np.int64)
        self.lose()

    def lose(self) -> None:
        """Forget all states."""
        self.slots[:] = POISON
        self.slots[:: self._size] = 0

    def step(self, plan: StepPlan, live: Sequence[int], step: int, pasts: Sequence[np.ndarray]) -> None:
        """Read and write the slots of these rows, whose texts with the new tokens are `pasts`. All reads come first."""
        assert plan.state_slots is not None, "a plan for recurrent layers"
        slots = plan.state_slots[list(live)]
        reads = slots[:, 1 if step else 0]
        found = self.slots[reads].copy()
        writes = slots[:, 1].tolist()
        others = set(reads[reads != slots[:, 1]].tolist())
        if len(set(writes)) < len(writes) or any(each % self._size == 0 or each in others for each in writes):
            raise PoisonError(f"rows write slots that others use: {slots.tolist()}")
        if (reads // self._size != slots[:, 1] // self._size).any():
            raise PoisonError(f"rows read and write slots of two ranks: {slots.tolist()}")
        for row, write, state, past in zip(live, writes, found, pasts, strict=True):
            first = int(plan.num_computed_tokens[row]) + step
            sums = np.cumsum(past * np.arange(1, len(past) + 1))
            if state.tolist() != [first, int(sums[first - 1]) if first else 0]:
                raise PoisonError(f"{plan.request_ids[row]} reads state {state.tolist()} at position {first}")
            self.slots[write] = len(past), sums[-1]


class FakeDrafts:
    """Drafted tokens of each slot: the right ones, but for one of four."""

    def __init__(self) -> None:
        self.positions: dict[int, int] = {}
        """Position of the newest token of each slot, after a speculative step."""
        self.tokens: dict[int, list[int]] = {}

    def draft(
        self, slot: int, text: list[int], count: int, guess: Callable[[np.ndarray], int], vocab_size: int
    ) -> None:
        """Draft `count` tokens after `text`. guess: returns the token that follows."""
        self.positions[slot] = len(text) - 1
        drafted: list[int] = []
        for _ in range(count):
            past = np.array([*text, *drafted])
            drafted.append((guess(past) + (len(past) % 4 == 0)) % vocab_size)
        self.tokens[slot] = drafted
