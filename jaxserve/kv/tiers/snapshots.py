"""Snapshots of recurrent states as the tiers see them: slots that are found and restored by hash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.kv.states import RecurrentStates
from jaxserve.kv.tiers.device import PageDevice
from jaxserve.types import BlockHash, BlockId


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The snapshots of one engine."""

    device: PageDevice[Any]
    """Copies slots."""
    states: Sequence[RecurrentStates]
    """The slots of each data rank."""

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """Return a slot with the snapshot of this name; None if no rank has it."""
        slots = (states.snapshots.get(block_hash) for states in self.states)
        return next((BlockId(slot) for slot in slots if slot is not None), None)

    def restore(self, block_hash: BlockHash, rank: int) -> BlockId | None:
        """Return a slot of a rank that is from now on the snapshot of this name, to be written before the next step. None if no slot
        is free, or if there is one of this name."""
        slot = self.states[rank].restore(block_hash)
        return None if slot is None else BlockId(slot)
