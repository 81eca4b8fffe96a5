"""Places of requests in the queue of the engine: running and waiting sequences, bounded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from jaxserve.errors import RateLimitError
from jaxserve.metrics import Metrics


class Admission:
    """Counts the sequences of all HTTP requests. It outlives engines."""

    def __init__(self, metrics: Metrics, max_sequences: Callable[[], int]) -> None:
        """`max_sequences`: returns this process's share of the engine's places; raises UnavailableError without one."""
        self._metrics = metrics
        self._max_sequences = max_sequences
        self._num_sequences = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_sequences(self) -> int:
        return self._num_sequences

    @property
    def max_sequences(self) -> int:
        """The most sequences that may run and wait: this process's share of the engine's."""
        return self._max_sequences()

    @contextlib.contextmanager
    def places(self, num_sequences: int) -> Iterator[None]:
        """Hold places for the sequences of one HTTP request. Raises RateLimitError if there are too few.

        The places are this process's share: the server as a whole never takes more than it promises.
        """
        limit = self._max_sequences()
        if self._num_sequences + num_sequences > limit:
            self._metrics.inc("admission_rejections", reason="queue_full")
            raise RateLimitError(
                f"The server is busy: {self._num_sequences} requests are running or waiting and at most "
                f"{limit} may (--max-num-seqs + --max-queued-requests). Please retry later."
            )
        self._num_sequences += num_sequences
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_sequences -= num_sequences
            if self._num_sequences == 0:
                self._is_idle.set()

    async def wait_idle(self) -> None:
        """Wait until no HTTP request holds places."""
        await self._is_idle.wait()
