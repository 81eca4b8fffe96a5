"""Slots of recurrent states: one for each running request, and snapshots of states at borders of pages.

A step reads a request's state from one slot and writes it to one. If they differ, the slot that was read keeps the state:
it is a snapshot, and nothing was copied. Snapshots are found by the hash of the last page before them, and a prefix can be
shared up to a snapshot. They are evicted, least recently used first, when a slot is needed.

    slot                     content
    0 of a rank              zeros: the state before the first token; never written
    of a request             the state after its computed tokens, steps in flight included
    kept                     a snapshot whose tokens are in a step in flight; published when the step is done
    snapshot                 the state after all tokens of the page it is named by

Snapshots are taken where a chunk of a prompt ends: at the end of the prefix that a request shares with an earlier one, near
the end of a long prompt, and, while slots are unused, after every other chunk. These places are multiples of UNIT_TOKENS, the
chunk of the recurrent kernels, so that a request that begins at a snapshot computes what it would have computed without.

Steps run in their order, so a slot may be given to another request while a step in flight still reads it; but not within
one step: what a request reads first is pinned until its second step.

Under data parallelism every rank has an equal share of the slots and snapshots of its own; the slots of a request are of the
rank of its pages.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import numpy as np

from jaxserve.kv.block_table import BlockTable, HashChain, RequestState
from jaxserve.types import BlockHash

UNIT_TOKENS: Final = 32
"""Tokens between places where snapshots can be taken: `jaxserve_kernels.segments.CHUNK`, which this package may not import."""
MIN_PROMPT_TOKENS: Final = 512
"""Tokens to compute from which a prompt gets a snapshot at its end: that costs it one more step, of few tokens."""


_NO_TOKENS: Final = np.empty(0, np.int32)
"""Given where the hashes of all pages are known."""


class RecurrentStates:
    """The state slots of one data rank."""

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        *,
        rank: int = 0,
        keeps_snapshots: bool = True,
        unit_tokens: int = UNIT_TOKENS,
    ) -> None:
        """num_slots: those of the rank, with its slot of zeros. keeps_snapshots: False without prefix caching. unit_tokens: see
        `unit`."""
        self._zeros = rank * num_slots
        self._blank = list(range(self._zeros + num_slots - 1, self._zeros, -1))
        self._block_size = block_size
        self._keeps_snapshots = keeps_snapshots
        self.unit = math.lcm(block_size, unit_tokens)
        """Tokens between places where snapshots can be taken."""
        self.snapshots: OrderedDict[BlockHash, int] = OrderedDict()
        """The slot of each snapshot by name, least recently used first."""
        self._pins: dict[BlockHash, int] = {}
        self.on_publish: Callable[[BlockHash], None] | None = None
        """Called with the name of each new snapshot."""

    def restore(self, block_hash: BlockHash) -> int | None:
        """Return a slot that is from now on the snapshot of this name; the next step comes after its content is written there. None if
        no slot is free, or if there is such a snapshot."""
        slot = None if block_hash in self.snapshots else self._allocate(may_evict=True)
        if slot is not None:
            self.snapshots[block_hash] = slot
        return slot

    @property
    def num_free(self) -> int:
        """Slots that requests can get now: unused ones, and snapshots that no request reads."""
        return len(self._blank) + len(self.snapshots) - len(self._pins)

    def usable_prefixes(self, chain: HashChain, tokens: np.ndarray, limit: int) -> list[bool]:
        """Return, for 0 to `limit` pages, whether a prefix of so many pages ends at a snapshot."""
        return [True] + [chain.hash(count - 1, tokens) in self.snapshots for count in range(1, limit + 1)]

    def can_start(self, block_hash: BlockHash | None) -> bool:
        """Return True if a request gets a slot of its own beside the snapshot that it starts from; None: from zeros."""
        is_used_up = block_hash is not None and block_hash not in self._pins
        return self.num_free - is_used_up > 0

    def start(self, state: RequestState, block_hash: BlockHash | None, num_tokens: int, branch: int) -> None:
        """Let a request begin at the snapshot of this name, or at zeros. `can_start` must be True.

        branch: tokens that it has in common with an earlier request, whether they are computed again or not.
        """
        state.slot = self._zeros
        if block_hash is not None:
            self.snapshots.move_to_end(block_hash)
            self._pins[block_hash] = self._pins.get(block_hash, 0) + 1
            state.pinned, state.slot = block_hash, self.snapshots[block_hash]
        state.spare = self._allocate(may_evict=True)
        assert state.spare is not None, "can_start was asked"
        places = {branch // self.unit * self.unit}
        if num_tokens >= MIN_PROMPT_TOKENS:
            places.add((num_tokens - 1) // self.unit * self.unit)
        state.places = tuple(sorted(places - {0})) if self._keeps_snapshots else ()

    def cut(self, state: RequestState, num_computed: int, count: int, num_known: int) -> int:
        """Return how many of `count` tokens the next chunk computes, at least 1: it ends where a snapshot can be taken."""
        end = num_computed + count
        if count > 1 and self._keeps_snapshots:
            end = min([end, *(place for place in state.places if place > num_computed)])
            border = end // self.unit * self.unit
            if end < num_known and border > num_computed:
                end = border
        return end - num_computed

    def assign(self, table: BlockTable, end: int, *, is_chunk: bool) -> tuple[int, int]:
        """Return the slots that the next step of a request reads and writes; after it, `end` tokens are computed.

        is_chunk: the step computes tokens of a prompt.
        """
        state = table.state
        read = state.slot
        if state.spare is not None:
            state.slot, state.spare = state.spare, None
        else:
            self._unpin(state)
            self._publish_landed(table)  # not `read`: until the next step no other row may write it
            if state.snapshot_at is not None:
                new = self._allocate(may_evict=state.snapshot_at in state.places)
                if new is not None:
                    state.kept.append((state.snapshot_at, read))
                    state.slot = new
        is_place = is_chunk and self._keeps_snapshots and end % self.unit == 0
        state.snapshot_at = end if is_place else None
        return read, state.slot

    def publish(self, table: BlockTable, tokens: np.ndarray, num_computed: int) -> None:
        """Name the snapshots among the first `num_computed` tokens, which are computed."""
        state, chain = table.state, table.chain
        while state.kept and state.kept[0][0] <= num_computed:
            end, slot = state.kept.pop(0)
            block_hash = chain.hash(end // self._block_size - 1, tokens)
            if block_hash in self.snapshots:
                self._blank.append(slot)
                continue
            self.snapshots[block_hash] = slot
            if self.on_publish is not None:
                self.on_publish(block_hash)

    def free(self, table: BlockTable) -> None:
        """Release the slots of a request. Its snapshots stay."""
        state = table.state
        self._publish_landed(table)
        own = state.slot if state.spare is None else state.spare  # with a spare one, the first step is not planned
        self._blank += [slot for _, slot in state.kept]
        if own:
            self._blank.append(own)
        self._unpin(state)
        state.clear()

    def forget(self) -> None:
        """Drop every snapshot that no request reads."""
        for block_hash in [each for each in self.snapshots if each not in self._pins]:
            self._blank.append(self.snapshots.pop(block_hash))

    def _publish_landed(self, table: BlockTable) -> None:
        """Name the snapshots of a request in the tokens of its published pages."""
        if table.state.kept:
            self.publish(table, _NO_TOKENS, table.num_published * self._block_size)

    def _allocate(self, *, may_evict: bool) -> int | None:
        if self._blank:
            return self._blank.pop()
        if not may_evict:
            return None
        victim = next((each for each in self.snapshots if each not in self._pins), None)
        return None if victim is None else self.snapshots.pop(victim)

    def _unpin(self, state: RequestState) -> None:
        if state.pinned is None:
            return
        self._pins[state.pinned] -= 1
        if not self._pins[state.pinned]:
            del self._pins[state.pinned]
        state.pinned = None
