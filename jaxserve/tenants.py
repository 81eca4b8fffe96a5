"""API keys as records: whose requests a key stands for, and what they may ask for.

The tenant of a request is found from its key before the body is read, and is known to all that runs for the request as
`TENANT`. Limits are counted in each API process on its share of them.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from hashlib import sha256
from typing import Final

import msgspec

from jaxserve.errors import RateLimitError, invalid
from jaxserve.metrics import Metrics

_MINUTE_S: Final = 60.0


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key, with the limits of its requests. None: no limit."""

    key: str
    name: str = ""
    """Shown in metrics and logs; a key without a name has no limits, no metrics and no salt."""
    max_concurrent_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Tokens of prompts and replies."""
    highest_priority: int = 0
    """The lowest number that requests may have as `priority`, and what those without one get if it is over 0."""
    shares_cache: bool = False
    """True: prefixes are shared with other keys, so that times tell whether another key has sent the same text."""
    is_operator: bool = False
    """True: requests may run commands of the operator."""


class _Bucket:
    """A limit on an amount per minute, as a token bucket of one minute."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._left = per_minute
        self._filled_s = clock()

    def wait_s(self) -> float:
        """Return the seconds until something may be taken; 0 if it may be now."""
        now_s = self._clock()
        self._left = min(self._per_minute, self._left + (now_s - self._filled_s) * self._per_minute / _MINUTE_S)
        self._filled_s = now_s
        return 0.0 if self._left > 0 else (1 - self._left) * _MINUTE_S / self._per_minute

    def take(self, amount: float) -> None:
        """Take an amount that is known only now; what is taken too much has to be refilled first."""
        self._left -= amount


class Tenant:
    """The requests of one key in this process."""

    def __init__(
        self, record: KeyRecord, metrics: Metrics, num_processes: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """num_processes: API processes that divide the limits."""
        self.record = record
        self._metrics = metrics
        self._secret = sha256(f"{record.name}\n{record.key}".encode()).hexdigest()
        self._num_running = 0
        limit = record.max_concurrent_requests
        self._max_running = None if limit is None else -(-limit // num_processes)
        rates = {"requests": record.requests_per_minute, "tokens": record.tokens_per_minute}
        self._buckets = {name: _Bucket(rate / num_processes, clock) for name, rate in rates.items() if rate is not None}

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Count one request inside the block. Raises RateLimitError beyond a limit of the key."""
        record = self.record
        if self._max_running is not None and self._num_running >= self._max_running:
            raise self._refused(
                "concurrent", f"at most {record.max_concurrent_requests} requests may run at the same time", 1.0
            )
        for name, bucket in self._buckets.items():
            if wait_s := bucket.wait_s():
                limit = record.requests_per_minute if name == "requests" else record.tokens_per_minute
                raise self._refused(name, f"at most {limit} {name} a minute are allowed", wait_s)
        if "requests" in self._buckets:
            self._buckets["requests"].take(1)
        self._count("requests", 1)
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    def priority(self, given: int | None) -> int:
        """Return the priority of a request; `given`: the request's own, None if it has none.

        Raises InvalidRequestError for one that requests of this key may not have.
        """
        highest = self.record.highest_priority
        if not self.record.name:
            return given or 0
        if given is None:
            return max(0, highest)
        if given < highest:
            raise invalid("priority", f"must be at least {highest} with this API key, got {given}")
        return given

    def salt(self, salt: str | None) -> str | None:
        """Return the salt of the request's pages in the prefix cache; `salt`: the request's own.

        It depends on the key itself, so that a request of another key cannot give the same one as its own.
        """
        if not self.record.name or self.record.shares_cache:
            return salt
        return f"{self.record.name}\n{self._secret}\n{salt or ''}"

    def use(self, num_prompt: int, num_completion: int) -> None:
        """Count tokens of a request that has ended."""
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(num_prompt + num_completion)
        self._count("prompt_tokens", num_prompt)
        self._count("generation_tokens", num_completion)

    def _count(self, what: str, amount: int) -> None:
        if self.record.name:
            self._metrics.inc(f"key_{what}", amount, key=self.record.name)

    def _refused(self, reason: str, text: str, wait_s: float) -> RateLimitError:
        self._metrics.inc("key_rejections", key=self.record.name, reason=reason)
        error = RateLimitError(f"The limit of this API key is reached: {text}. Please retry later.")
        error.retry_after_s = math.ceil(wait_s)
        return error


TENANT: Final[ContextVar[Tenant | None]] = ContextVar("tenant", default=None)
"""The tenant of the request that is being served; None without keys."""
HTTP_REQUEST_ID: Final[ContextVar[str]] = ContextVar("http_request_id", default="")
"""The id of the request that is being served, which the client may have chosen."""
