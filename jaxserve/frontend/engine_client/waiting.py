"""Number of prompt tokens that wait for the engine: those of requests without an output yet."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.errors import RateLimitError
from jaxserve.ipc.messages import AddRequest
from jaxserve.types import RequestId


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
            raise RateLimitError(
                f"The server is busy: prompts of {self.num_tokens} tokens wait, yours has {num_fresh}, and at most "
                f"{self._max_tokens} may (--max-queued-tokens). Please retry later."
            )
        self._tokens |= fresh
        self.num_tokens += num_fresh

    def remove(self, request_id: RequestId) -> None:
        """Stop counting a request: it has its first output, or it was aborted."""
        self.num_tokens -= self._tokens.pop(request_id, 0)
