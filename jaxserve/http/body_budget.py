"""The memory that requests may take together while they are read and prepared: their bodies, and the stored responses that they continue."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

from jaxserve.errors import RateLimitError


class BodyBudget:
    """Bytes of requests in this process, reserved before they are read."""

    def __init__(self, max_bytes: int | None = None) -> None:
        """max_bytes: None for no limit."""
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._by_key: Counter[str] = Counter()

    @contextlib.contextmanager
    def reservation(self, key_name: str = "") -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves bytes for one request until the end of the block.

        It raises RateLimitError beyond the limit, or beyond three quarters of it for requests of one key, but never for one
        request alone. key_name: the key that shares the limit with others; empty if none does.
        """
        own = 0

        def reserve(num_bytes: int) -> None:
            nonlocal own
            if self._max_bytes is not None and self.num_bytes > own and self.num_bytes + num_bytes > self._max_bytes:
                raise RateLimitError(
                    f"The server is busy: requests of {self.num_bytes} bytes are being read, yours has up to {num_bytes} more, "
                    f"and at most {self._max_bytes} may be (--max-body-memory). Please retry later."
                )
            self._check_share(key_name, own, num_bytes)
            self.num_bytes += num_bytes
            self._by_key[key_name] += num_bytes
            own += num_bytes

        try:
            yield reserve
        finally:
            self.num_bytes -= own
            self._by_key[key_name] -= own

    def _check_share(self, key_name: str, own: int, num_bytes: int) -> None:
        """Raise RateLimitError if requests of a key would leave too little memory to other keys. own: bytes of this request."""
        if self._max_bytes is None or not key_name:
            return
        held, share = self._by_key[key_name], self._max_bytes - self._max_bytes // 4
        if held > own and held + num_bytes > share:
            raise RateLimitError(
                f"Requests of {held} bytes of this API key are being read, yours has up to {num_bytes} more, and at most {share} "
                "may be, since other keys share the server (--max-body-memory). Please retry later."
            )
