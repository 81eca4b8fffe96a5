"""The places and the prompt tokens that requests of one API process may hold."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from jaxserve.errors import RateLimitError
from jaxserve.ipc.messages import AddRequest
from jaxserve.metrics import Metrics
from jaxserve.tenants import TENANT
from jaxserve.types import RequestId


@contextlib.contextmanager
def counting_rejections(metrics: Metrics) -> Iterator[None]:
    """Count a RateLimitError that leaves the block."""
    try:
        yield
    except RateLimitError as error:
        metrics.inc("admission_rejections", reason=error.reason)
        raise


class Admission:
    """Counts the sequences of all HTTP requests. It outlives engines."""

    def __init__(self, metrics: Metrics, max_sequences: Callable[[], int]) -> None:
        """`max_sequences`: returns the engine's places, which other API processes may take as well; raises UnavailableError without one."""
        self._metrics = metrics
        self._max_sequences = max_sequences
        self._num_sequences = 0
        self._by_key: Counter[str] = Counter()
        self.has_several_keys = False
        """True: requests of one key with a name get three quarters of the places at most."""
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_sequences(self) -> int:
        return self._num_sequences

    @property
    def max_sequences(self) -> int:
        """The most sequences that may run and wait."""
        return self._max_sequences()

    @contextlib.contextmanager
    def places(self, num_sequences: int) -> Iterator[None]:
        """Hold places for the sequences of one HTTP request. Raises RateLimitError if there are too few.

        With several API processes, the engine refuses the requests that are too many for all of them together.
        """
        limit = self._max_sequences()
        if self._num_sequences + num_sequences > limit:
            self._metrics.inc("admission_rejections", reason="queue_full")
            raise RateLimitError(
                f"The server is busy: {self._num_sequences} requests are running or waiting and at most "
                f"{limit} may (--max-num-seqs + --max-queued-requests). Please retry later."
            )
        tenant = TENANT.get()
        key_name = "" if tenant is None else tenant.record.name
        self._check_share(key_name, num_sequences, limit)
        self._num_sequences += num_sequences
        self._by_key[key_name] += num_sequences
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_sequences -= num_sequences
            self._by_key[key_name] -= num_sequences
            if self._num_sequences == 0:
                self._is_idle.set()

    def _check_share(self, key_name: str, num_sequences: int, limit: int) -> None:
        """Raise RateLimitError if a key would leave too few places for the others; one HTTP request alone never does."""
        held, share = self._by_key[key_name], limit - limit // 4
        if self.has_several_keys and key_name and held and held + num_sequences > share:
            self._metrics.inc("admission_rejections", reason="key_share")
            raise RateLimitError(
                f"{held} requests of this API key are running or waiting, and at most {share} may, since other keys share "
                "the server. Please retry later."
            )

    async def wait_idle(self) -> None:
        """Wait until no HTTP request holds places."""
        await self._is_idle.wait()


class WaitingPrompts:
    """Counts a prompt that several choices share once."""

    def __init__(self, max_tokens: int | None) -> None:
        """`max_tokens`: None for no limit."""
        self._max_tokens = max_tokens
        self._tokens: dict[RequestId, int] = {}
        self.num_tokens = 0

    def add(self, requests: Sequence[AddRequest]) -> None:
        """Count the prompts. Raises RateLimitError, and counts nothing, if they are too many; one HTTP request alone never is."""
        shared = {id(request.prompt_token_ids): request for request in reversed(requests)}
        fresh = {request.request_id: len(request.prompt_token_ids) for request in shared.values()}
        num_fresh = sum(fresh.values())
        if self._max_tokens is not None and self._tokens and self.num_tokens + num_fresh > self._max_tokens:
            error = RateLimitError(
                f"The server is busy: prompts of {self.num_tokens} tokens wait, yours has {num_fresh}, and at most "
                f"{self._max_tokens} may (--max-queued-tokens). Please retry later."
            )
            error.reason = "queued_tokens"
            raise error
        self._tokens |= fresh
        self.num_tokens += num_fresh

    def remove(self, request_id: RequestId) -> None:
        """Stop counting a request: it has its first output, or it was aborted."""
        self.num_tokens -= self._tokens.pop(request_id, 0)
