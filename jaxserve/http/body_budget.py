"""The memory that requests may take together while they are read and prepared: their bodies, and the stored responses that they continue."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from jaxserve.errors import RateLimitError


class BodyBudget:
    """Bytes of requests in this process, reserved before they are read."""

    def __init__(self, max_bytes: int | None = None) -> None:
        """max_bytes: None for no limit."""
        self._max_bytes = max_bytes
        self.num_bytes = 0

    @contextlib.contextmanager
    def reservation(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves bytes for one request until the end of the block.

        It raises RateLimitError beyond the limit, but never for one request alone.
        """
        own = 0

        def reserve(num_bytes: int) -> None:
            nonlocal own
            if self._max_bytes is not None and self.num_bytes > own and self.num_bytes + num_bytes > self._max_bytes:
                raise RateLimitError(
                    f"The server is busy: requests of {self.num_bytes} bytes are being read, yours has up to {num_bytes} more, "
                    f"and at most {self._max_bytes} may be (--max-body-memory). Please retry later."
                )
            self.num_bytes += num_bytes
            own += num_bytes

        try:
            yield reserve
        finally:
            self.num_bytes -= own
