"""A choice that has ended, as traces show it. The span of the HTTP request takes it; without tracing there is none."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Protocol

from jaxserve.ipc.messages import AddRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedChoice:
    """One choice that has ended. Times are seconds of the monotonic clock."""

    model_name: str
    request: AddRequest
    submitted_s: float
    queue_s: float | None
    """Time from arrival in the engine to the first step; None before one."""
    first_token_s: float | None
    ended_s: float
    num_tokens: int
    num_cached_tokens: int
    finish_reason: str


class RequestSpan(Protocol):
    """The span of one HTTP request."""

    def add_choice(self, choice: EndedChoice) -> None:
        """Show a choice and its phases below the request."""
        ...


REQUEST_SPAN: Final[ContextVar[RequestSpan | None]] = ContextVar("request_span", default=None)
"""The span of the HTTP request that runs."""
