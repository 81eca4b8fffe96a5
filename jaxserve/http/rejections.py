"""The last errors of requests, and a line in the log for one that is refused: an operator sees what clients get wrong."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.errors import RequestError

_log = logging.getLogger(__name__)

_MAX_LINES = 10
"""Lines in one period."""
_PERIOD_S = 60.0
_MAX_KEPT = 20


@dataclass(frozen=True, slots=True)
class Rejection:
    """A request that was refused or failed, without its message, which may repeat what the client wrote."""

    time: float
    """Unix time in seconds."""
    route: str
    status: int
    param: str | None


class RejectionLog:
    """Logs refused requests, at most `_MAX_LINES` in `_PERIOD_S`; the next line says how many were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._period_start = clock()
        self._num_lines = 0
        self._num_left_out = 0
        self._last: deque[Rejection] = deque(maxlen=_MAX_KEPT)

    @property
    def last(self) -> list[Rejection]:
        """The last requests that were refused or failed, newest first."""
        return list(reversed(self._last))

    def note(self, route: str, status: int, error: RequestError | None) -> None:
        """Keep an error, and log one of the client. error: the one that the client got; None if a stream had begun.

        Errors of the server are logged where they happen, with their exception.
        """
        param = None if error is None else error.param
        self._last.append(Rejection(time.time(), route, status, param))
        if status >= 500 or error is None:
            return
        now = self._clock()
        if now - self._period_start >= _PERIOD_S:
            self._period_start, self._num_lines = now, 0
        if self._num_lines >= _MAX_LINES:
            self._num_left_out += 1
            return
        left_out = (
            f" ({self._num_left_out} refused requests before this one are not shown)" if self._num_left_out else ""
        )
        self._num_lines, self._num_left_out = self._num_lines + 1, 0
        _log.info("refused: %s %d param=%s: %s%s", route, status, param or "-", error.message, left_out)
