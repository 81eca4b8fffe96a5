"""Finds the request whose steps fail: those of a failed step are computed again, one half of them at a time.

A failed step loses the state of the device, so every running request goes back to the queue and computes its tokens again.
If several requests were in the step, one half of them runs first. A half that fails is halved again, until a request fails
alone: only that one ends. A half whose requests have all got two further tokens, one from a prefill and one from a decode
step, or have ended, is cleared and keeps running, and the next half starts. All other requests, new ones as well, are held
back meanwhile: a failure then has few suspects. A cleared request may fail later, so the last suspect of a step that had
cleared ones in it is computed once more without them, and they are suspects again. With B requests in the step, one request
that always fails is found after at most 2 + log2(B) failures.

The tokens of the others do not change: a token depends on its prefix, the request's seed and its position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

R = TypeVar("R")


class Isolation(Generic[R]):
    """The requests under suspicion, and those that wait until the search is over."""

    def __init__(self, enqueue: Callable[[R], None], progress: Callable[[R], int]) -> None:
        """enqueue: lets a request wait for its start. progress: returns a number that grows with each output of a request."""
        self._enqueue = enqueue
        self._progress = progress
        self._groups: list[list[R]] = []
        """Suspects; the last group is under test, and those before it follow."""
        self._marks: dict[R, int] = {}
        """Progress of each suspect when its step failed."""
        self._cleared: list[R] = []
        self.held: list[R] = []
        """Requests that start when their group is under test, or when the search is over."""

    @property
    def is_active(self) -> bool:
        return bool(self._groups)

    def takes(self, request: R) -> bool:
        """Hold `request` back if it must not start now; returns True if so."""
        is_held = self.is_active and request not in self._groups[-1] and request not in self._cleared
        if is_held:
            self.held.append(request)
        return is_held

    def fail(self, rows: Sequence[R], others: Iterable[R]) -> R | None:
        """Take the requests of a failed step, and all others that ran or waited; returns the culprit if it is found.

        The requests that may start now are enqueued, without the culprit. No suspect is found without rows.
        """
        suspects = self._suspects(rows)
        self._cleared = [request for request in self._cleared if request not in suspects]
        culprit = suspects[0] if len(suspects) == len(rows) == 1 else None
        if len(suspects) > 1:
            middle = len(suspects) // 2
            self._suspect(suspects[middle:], suspects[:middle])
        elif suspects and culprit is None:
            self._suspect(self._cleared, suspects)
            self._cleared = []
        self._open([request for request in dict.fromkeys((*others, *self.held)) if request is not culprit])
        return culprit

    def advance(self) -> None:
        """Clear the suspects that have got two further tokens; start the next group, or everything when none is left."""
        if not self._groups:
            return
        num_groups = len(self._groups)
        while self._groups:
            group = self._groups[-1]
            passed = [request for request in group if self._progress(request) > self._marks[request] + 1]
            self._cleared += passed
            self._groups[-1] = [request for request in group if request not in passed]
            if self._groups[-1]:
                break
            self._groups.pop()
        if len(self._groups) < num_groups:
            self._open(self.held)

    def forget(self, request: R) -> None:
        """Drop a request that has ended."""
        if not self._groups:
            return
        self._marks.pop(request, None)
        for line in (*self._groups, self._cleared, self.held):
            if request in line:
                line.remove(request)

    def _suspect(self, *groups: Sequence[R]) -> None:
        """Put `groups` under test, the last one first."""
        self._groups += [list(group) for group in groups]
        self._marks |= {request: self._progress(request) for group in groups for request in group}

    def _suspects(self, rows: Sequence[R]) -> list[R]:
        """Return the rows of the group under test, which is dissolved; all rows if it has none."""
        if not self._groups:
            return list(rows)
        group = self._groups[-1]
        suspects = [request for request in rows if request in group]
        if not suspects:
            return list(rows)
        self._groups[-1] = [request for request in group if request not in suspects]
        return suspects

    def _open(self, requests: Sequence[R]) -> None:
        """Enqueue those of `requests` that may start now, and hold the others."""
        while self._groups and not self._groups[-1]:
            self._groups.pop()
        if not self._groups:
            self._marks.clear()
            self._cleared.clear()
        self.held = []
        for request in requests:
            if not self.takes(request):
                self._enqueue(request)
