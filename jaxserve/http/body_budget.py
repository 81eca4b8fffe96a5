"""The memory that request bodies may take together while they are read and prepared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jaxserve.errors import RateLimitError


class BodyBudget:
    """Bytes of bodies in this process, reserved before they are read."""

    def __init__(self, max_bytes: int | None = None) -> None:
        """max_bytes: None for no limit."""
        self._max_bytes = max_bytes
        self.num_bytes = 0

    @contextlib.contextmanager
    def reserved(self, num_bytes: int) -> Iterator[None]:
        """Reserve the bytes of a body inside the block. Raises RateLimitError beyond the limit, but never for one body alone."""
        if self._max_bytes is not None and self.num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            raise RateLimitError(
                f"The server is busy: bodies of {self.num_bytes} bytes are being read, yours has up to {num_bytes}, and at most "
                f"{self._max_bytes} may be (--max-body-memory). Please retry later."
            )
        self.num_bytes += num_bytes
        try:
            yield
        finally:
            self.num_bytes -= num_bytes
