"""Races between the warps of a block over its shared memory, where named barriers are all that orders them.

Modelled, from the PTX ISA ("Memory Consistency Model", "bar, barrier", "cp.async"): a write must be ordered after every
earlier access of its bytes by another warp, and a read after every earlier write; `bar.sync` orders what its warps did
before it. A write of the very bytes that are there already is no race: several warps may store one result. A copy writes at some time between its start and the wait for it, and threads other than its own see the
bytes after a barrier that follows the wait. Found from vector clocks (Fidge 1988; FastTrack, PLDI 2009), so a race is
seen whatever order the warps took.

Only for blocks without mbarriers, which order accesses as well.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tests.ptx.hazards import Hazard

Addresses = npt.NDArray[np.int64]
_NEVER = -1


class Races:
    """The last accesses of each byte, and what each warp knows of the others."""

    def __init__(self, size: int, num_warps: int) -> None:
        self._clock = np.full((num_warps, num_warps), _NEVER, np.int32)
        np.fill_diagonal(self._clock, 0)
        """Row w: the phase of each warp up to which w has seen all it did; on the diagonal, its own phase."""
        self._writer = np.zeros(size, np.int8)
        self._written = np.full(size, _NEVER, np.int32)
        """Phase of the writer at its last write."""
        self._is_copied = np.zeros(size, np.bool_)
        """Written by a copy: visible to one thread, so even its own warp needs a barrier."""
        self._read = np.full((num_warps, size), _NEVER, np.int32)
        """Phase of each warp at its last read."""

    def read(self, warp: int, places: Addresses) -> None:
        """Note a read. Raises Hazard."""
        self._check_written(warp, places, "reads")
        self._read[warp, places] = self._clock[warp, warp]

    def write(self, warp: int, places: Addresses, changed: Addresses) -> None:
        """Note a write; `changed` are the places whose bytes become others. Raises Hazard."""
        self.begin(warp, changed)
        self._writer[places] = warp
        self._written[places] = self._clock[warp, warp]
        self._is_copied[places] = False

    def begin(self, warp: int, places: Addresses) -> None:
        """Check that a copy may write from now on. Raises Hazard."""
        self._check_written(warp, places, "writes")
        for other, phases in enumerate(self._read):
            if other != warp and (phases[places] > self._clock[warp, other]).any():
                raise Hazard(f"warp {warp} writes shared memory that warp {other} read, with no barrier between them")

    def finish(self, warp: int, places: Addresses) -> None:
        """Note that a copy was waited for."""
        self._writer[places] = warp
        self._written[places] = self._clock[warp, warp]
        self._is_copied[places] = True

    def meet(self, warps: Iterable[int]) -> None:
        """Order what these warps did before a barrier before what they do after it."""
        met = list(warps)
        self._clock[met] = self._clock[met].max(axis=0)
        self._clock[met, met] += 1

    def _check_written(self, warp: int, places: Addresses, does: str) -> None:
        writer, written = self._writer[places], self._written[places]
        seen: npt.NDArray[np.int32] = self._clock[warp][writer]
        own = writer == warp
        is_unseen = np.where(own, self._is_copied[places] & (written == seen), written > seen)
        if (is_unseen & (written != _NEVER)).any():
            raise Hazard(f"warp {warp} {does} shared memory that was written, with no barrier in between")
