"""What a request took, for those who ask with `return_metrics`."""

from __future__ import annotations

import msgspec


class RequestTiming(msgspec.Struct):
    """Of all choices together. Null where nothing was generated."""

    queue_seconds: float | None = None
    """From the engine's hearing of the request to the first step that computed any of it."""
    time_to_first_token_seconds: float | None = None
    """From the moment at which the prompt was ready as tokens."""
    total_seconds: float = 0.0
    """From the same moment to the end."""
    tokens_per_second: float | None = None
    """Tokens behind the first, by the time between the first and the last; null for one token."""
