"""Orders the requests of several API keys so that each key gets its share: start-time fair queueing.

Each request gets a start tag when it arrives: the end of its key's last request, or the virtual time if that is later. The
end is the start plus the tokens that the request is expected to cost; the virtual time is the tag of the request whose turn
is next. Requests go in order of their tags, so keys that have requests waiting take turns by tokens, and one that has asked
for little goes first. Tags of one key grow, so its requests keep their order of arrival. While nothing waits, no key owes
anything.

One key cannot hold every row of a step: the last one stays free once a second key is known, so that a request of another key
starts at once.

Source: Goyal, Vin and Cheng, "Start-time Fair Queueing" (SIGCOMM 1996).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

Rank = tuple[int, int, int]
"""Priority, start tag, order of arrival: the lowest goes first. Unique."""

_FIRST_OUTPUT: Final = 128
"""Output tokens that a key's requests are expected to have before one has ended."""
_WEIGHT: Final = 0.1
"""Weight of the last request in a key's mean number of output tokens."""
_LEAST_ROWS: Final = 8
"""Rows of a step from which on the last one is kept for other keys."""


class KeyedRequest(Protocol):
    """A request with the name of its API key; empty: of a key without a name, or of none."""

    @property
    def key_name(self) -> str: ...


class FairKeys:
    """Start tags of requests, by key."""

    def __init__(self) -> None:
        self._now = 0
        self._ends: dict[str, int] = {}
        """End tag of each key's last request."""
        self._outputs: dict[str, float] = {}
        """Mean number of output tokens of each key's requests."""

    def tag(self, key_name: str, num_prompt: int, max_output: int) -> int:
        """Return the start tag of a request that arrives now. num_prompt, max_output: tokens."""
        start = max(self._now, self._ends.get(key_name, 0))
        expected = min(max_output, int(self._outputs.get(key_name, _FIRST_OUTPUT)))
        self._ends[key_name] = start + max(1, num_prompt + expected)
        return start

    def set_time(self, next_tag: int | None) -> None:
        """Note the tag of the waiting request that is next; None if nothing waits."""
        self._now = max(self._now, max(self._ends.values(), default=0) if next_tag is None else next_tag)

    def end(self, key_name: str, num_output: int) -> None:
        """Note how many tokens a request of this key was answered with."""
        mean = self._outputs.get(key_name, float(num_output))
        self._outputs[key_name] = mean + _WEIGHT * (num_output - mean)

    def keeps_row(self, request: KeyedRequest, running: Sequence[KeyedRequest], max_rows: int) -> bool:
        """Return True if `request` may not have the only row that is left, since its key has all the others."""
        if len(self._ends) < 2 or max_rows < _LEAST_ROWS or len(running) < max_rows - 1:
            return False
        return all(other.key_name == request.key_name for other in running)
