"""The memory that log-probabilities and experts of replies may take together, reserved before a request reaches the engine.

Text is not reserved: a token of it takes a few bytes, and the context bounds the tokens. A token with twenty
log-probabilities takes thousands of bytes until its reply is sent, `n` times the context in one request; a token with the
experts of sixty layers takes as much.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

from jaxserve.errors import PayloadTooLargeError, RateLimitError
from jaxserve.ipc.messages import AddRequest

BYTES_PER_SCORE: Final = 512
"""Upper bound of the memory of one log-probability: as the engine sends it, spelled, and as JSON."""
COPIES_OF_EXPERTS: Final = 5
"""Upper bound of the memory of an expert's number, in copies of it: from the engine, joined, in base64, and as JSON."""


def num_scores(requests: Sequence[AddRequest]) -> int:
    """Return how many log-probabilities the replies to these requests may have, those of the prompts among them."""
    total = 0
    for request in requests:
        sampling = request.sampling
        if sampling.num_top_logprobs is not None:
            total += sampling.max_tokens * (1 + sampling.num_top_logprobs)
        if sampling.num_prompt_logprobs is not None:
            total += len(request.prompt_token_ids) * (1 + sampling.num_prompt_logprobs)
    return total


def num_routed_tokens(requests: Sequence[AddRequest]) -> int:
    """Return of how many tokens the replies to these requests may have the experts."""
    routed = [request for request in requests if request.returns_routed_experts]
    return sum(len(request.prompt_token_ids) + request.sampling.max_tokens for request in routed)


class ReplyBudget:
    """Bytes that are reserved for the log-probabilities and experts of replies in this process."""

    def __init__(self, max_bytes: int | None = None) -> None:
        """max_bytes: None for no limit."""
        self._max_bytes = max_bytes
        self.num_bytes = 0

    @contextlib.contextmanager
    def reserved(self, requests: Sequence[AddRequest], experts_bytes: int = 0) -> Iterator[None]:
        """Reserve what the replies may take inside the block. experts_bytes: of a token's experts, for requests that want them.

        Raises PayloadTooLargeError if they exceed the limit alone, RateLimitError if they do with those under way.
        """
        scores = num_scores(requests)
        num_bytes = scores * BYTES_PER_SCORE
        if num_tokens := num_routed_tokens(requests):
            num_bytes += num_tokens * experts_bytes * COPIES_OF_EXPERTS
            self._require_memory(num_bytes)
        if self._max_bytes is not None and num_bytes > self._max_bytes:
            raise PayloadTooLargeError(
                f"The reply may have {scores} log-probabilities, at most {self._max_bytes // BYTES_PER_SCORE} fit "
                "(--max-reply-memory). Please reduce max_tokens, n or the number of log-probabilities.",
                code="reply_too_large",
            )
        if self._max_bytes is not None and self.num_bytes + num_bytes > self._max_bytes and num_bytes:
            raise RateLimitError(
                f"The server is busy: replies under way may have {self.num_bytes // BYTES_PER_SCORE} log-probabilities, "
                f"yours {scores}, and at most {self._max_bytes // BYTES_PER_SCORE} may be (--max-reply-memory). "
                "Please retry later."
            )
        self.num_bytes += num_bytes
        try:
            yield
        finally:
            self.num_bytes -= num_bytes

    def _require_memory(self, num_bytes: int) -> None:
        """Raise PayloadTooLargeError or RateLimitError if replies with experts may take more than is left."""
        if self._max_bytes is None or self.num_bytes + num_bytes <= self._max_bytes:
            return
        if num_bytes > self._max_bytes:
            raise PayloadTooLargeError(
                f"The reply may take {num_bytes} bytes with the experts of its tokens, at most {self._max_bytes} fit "
                "(--max-reply-memory). Please reduce max_tokens or n.",
                code="reply_too_large",
            )
        raise RateLimitError(
            f"The server is busy: replies under way may take {self.num_bytes} bytes, yours with the experts of its tokens "
            f"{num_bytes}, and at most {self._max_bytes} may be taken (--max-reply-memory). Please retry later."
        )
