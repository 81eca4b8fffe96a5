"""The state of one replica as far as its router knows: its load and its pages."""

from __future__ import annotations

from typing import NewType

from jaxserve.routing.pages import HeldPages
from jaxserve.routing.request import RouteRequest

ReplicaId = NewType("ReplicaId", str)


class Replica:
    """The load counts what this router has routed; several routers in front of the same replicas count separately."""

    __slots__ = ("num_requests", "outstanding_tokens", "pages", "replica_id")

    def __init__(self, replica_id: ReplicaId) -> None:
        self.replica_id = replica_id
        self.num_requests = 0
        """Requests that were routed here and have not ended."""
        self.outstanding_tokens = 0
        """Prompt tokens to compute and output tokens to generate for these requests, as expected."""
        self.pages = HeldPages()

    def num_cached_tokens(self, request: RouteRequest) -> int:
        """Return the number of the request's prompt tokens whose KV the replica holds or is about to hold."""
        return self.pages.num_leading(request.pages) * request.block_size


class Route:
    """One request on its replica. Its tokens count as outstanding until they are computed or it ends."""

    __slots__ = (
        "_num_output_tokens",
        "_num_prompt_tokens",
        "_sends_snapshots",
        "num_cached_tokens",
        "replica",
        "request",
    )

    def __init__(self, replica: Replica, request: RouteRequest, *, sends_snapshots: bool = False) -> None:
        """sends_snapshots: True if the replica reports its pages by `HeldPages.replace`, False if by `change`."""
        self.replica = replica
        self.request: RouteRequest | None = request
        """The request; None once the route has ended."""
        self._sends_snapshots = sends_snapshots
        self.num_cached_tokens = replica.num_cached_tokens(request)
        """Prompt tokens that the router took for cached."""
        self._num_prompt_tokens = request.num_prompt_tokens - self.num_cached_tokens
        self._num_output_tokens = max(1, request.num_output_tokens)
        replica.num_requests += 1
        replica.outstanding_tokens += self._num_prompt_tokens + self._num_output_tokens
        replica.pages.expect(request.pages)

    def note_output(self, num_tokens: int) -> None:
        """Count output tokens. The first of them shows that the prompt is computed."""
        if self.request is None:
            return
        # A request that generates more than expected has at least one token left.
        num_left = max(1, self._num_output_tokens - num_tokens)
        self.replica.outstanding_tokens -= self._num_prompt_tokens + self._num_output_tokens - num_left
        self._num_prompt_tokens, self._num_output_tokens = 0, num_left

    def end(self) -> None:
        """Stop counting the request. Later calls change nothing."""
        if self.request is None:
            return
        self.replica.num_requests -= 1
        self.replica.outstanding_tokens -= self._num_prompt_tokens + self._num_output_tokens
        if self._sends_snapshots:
            self.replica.pages.settle_later(self.request.pages)
        else:
            self.replica.pages.settle(self.request.pages)
        self.request = None
