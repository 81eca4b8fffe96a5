"""Barriers of a block, in which warps wait for each other and for bulk copies.

Modelled, from the PTX ISA ("Parallel Synchronization: mbarrier", "bar, barrier"): phases with a count of arrivals and of
bytes that are still expected, waiting by parity, and named barriers of a number of threads. A phase with more arrivals
than it counts is a hazard.

Not modelled: barriers of clusters, `mbarrier.inval`, a wait that lags by two phases (parity cannot tell).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tests.ptx.hazards import Hazard


class TransactionBarrier:
    """An mbarrier."""

    def __init__(self, num_arrivals: int) -> None:
        self._num_arrivals = num_arrivals
        self._missing = num_arrivals
        self._bytes = 0
        self._parity = 0

    def __str__(self) -> str:
        return f"{self._missing} of {self._num_arrivals} arrivals and {self._bytes} bytes are missing"

    @property
    def is_between_phases(self) -> bool:
        """True if no thread has arrived yet, and no bytes are expected."""
        return self._missing == self._num_arrivals and self._bytes == 0

    def arrive(self, count: int, expected_bytes: int = 0, *, is_last: bool = True) -> None:
        """`count` threads arrive, with bytes that the phase has to wait for as well. is_last: they may complete the phase."""
        if count == self._missing and not is_last:
            raise Hazard(f"an arrival that must not complete a phase does: {self}")
        if count > self._missing:
            raise Hazard(f"a barrier has more arrivals than it counts: {count} more where {self}")
        self._bytes += expected_bytes
        self._missing -= count
        self._complete()

    def receive(self, num_bytes: int) -> None:
        """Bytes that a copy has written."""
        self._bytes -= num_bytes
        self._complete()

    def has_completed(self, parity: int) -> bool:
        """Return True if the phase of that parity, the last or the present one, is complete."""
        return self._parity != parity

    def _complete(self) -> None:
        if self._missing == 0 and self._bytes == 0:
            self._parity ^= 1
            self._missing = self._num_arrivals


class ThreadBarrier:
    """A named barrier (`bar.sync`). on_passed: called with the warps that meet, when all are there."""

    def __init__(self, on_passed: Callable[[Iterable[int]], None]) -> None:
        self._on_passed = on_passed
        self._warps: set[int] = set()
        self._num_passed = 0

    def arrive(self, warp: int, num_warps: int) -> int:
        """The warp's turn, for `has_passed`."""
        if warp in self._warps:
            raise Hazard(f"warp {warp} is at a barrier where it waits already")
        self._warps.add(warp)
        turn = self._num_passed
        if len(self._warps) == num_warps:
            self._num_passed += 1
            self._on_passed(self._warps)
            self._warps = set()
        return turn

    def has_passed(self, turn: int) -> bool:
        """Return True if all warps of that turn have arrived."""
        return self._num_passed > turn
