"""Messages between the ingress and a replica: one request, then the head and the bytes of its reply."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.errors import UnavailableError
from jaxserve.routing.request import RouteRequest

HOP_HEADERS = frozenset(
    {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
)
"""Headers of one connection, in lower case: they are not passed on."""

INGRESS_HEADERS = frozenset({"date", "server", "x-request-id"})
"""Headers of replies, in lower case, that the ingress adds."""


@dataclass(frozen=True, slots=True)
class WireRequest:
    """One HTTP request."""

    method: str
    target: str
    """Path and query."""
    headers: tuple[tuple[str, str], ...]
    body: bytes
    route: RouteRequest
    stored_at: str | None = None
    """The replica that stores the response that the request names."""
    avoid: str | None = None
    """The replica that failed the request before."""


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """Status and headers of a reply. The parts after it are bytes of the body."""

    status: int
    headers: tuple[tuple[str, str], ...]
    replica: str
    """The replica that answers."""

    @classmethod
    def of_no_server(cls, replica: str) -> ReplyHead:
        """Return the head of a replica whose server did not answer: a status by which it is retried, and no headers."""
        return cls(UnavailableError.status, (), replica)

    @property
    def is_event_stream(self) -> bool:
        return any(name.lower() == "content-type" and "text/event-stream" in value for name, value in self.headers)


ReplyPart = ReplyHead | bytes
