"""The requests that are held to a grammar, and how long anybody waits for their masks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from jaxserve.errors import InvalidRequestError
from jaxserve.ipc.messages import AddRequest, ErrorInfo
from jaxserve.sampling.params import needs_state
from jaxserve.scheduler.admission import error_info
from jaxserve.scheduler.grammars import Grammars, GrammarState
from jaxserve.scheduler.request import Request
from jaxserve.types import RequestId

_PATIENCE_S: Final = 0.005
"""How long a step waits for the masks of its rows; those that are late miss it."""
_IDLE_PATIENCE_S: Final = 0.02
"""The same when there is nothing else to do: after that, messages are looked at."""


@dataclass(slots=True)
class Settled:
    """What came of the grammars since the last time."""

    prepared: list[Request] = field(default_factory=list)
    """They can start."""
    forced: list[tuple[Request, list[int]]] = field(default_factory=list)
    """Tokens that come next, whatever the model thinks."""
    over: list[Request] = field(default_factory=list)
    """Nothing may come behind their newest token."""
    failed: list[tuple[Request, ErrorInfo]] = field(default_factory=list)


class ConstrainedRequests:
    """The requests whose grammar may have news: all that have one, but for those that only wait for their first step."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._all: dict[RequestId, Request] = {}
        self._preparing: dict[RequestId, Request] = {}
        """Their grammar is not ready for the first token."""

    def __bool__(self) -> bool:
        return bool(self._all)

    def follow(self, message: AddRequest) -> GrammarState | None:
        """The grammar of a new request, just begun; None when it has none."""
        if message.grammar is None or self._grammars is None:
            return None
        # What the device keeps of a request's tokens, and log-probabilities, come of sampled tokens alone.
        jump_forward = not needs_state(message.sampling) and message.sampling.num_top_logprobs is None
        return self._grammars.follow(message.grammar, message.sampling.allowed_token_ids, jump_forward=jump_forward)

    def add(self, request: Request) -> None:
        """A new one; it is to wait until `settle` calls it prepared."""
        self._all[request.request_id] = self._preparing[request.request_id] = request

    def start(self, request: Request) -> None:
        """One that was prepared is to run: its grammar has news with every token."""
        if request.grammar is not None:
            self._all[request.request_id] = request

    def remove(self, request: Request) -> bool:
        """Forget a request that ends; whether it was still being prepared."""
        self._all.pop(request.request_id, None)
        return self._preparing.pop(request.request_id, None) is not None

    def settle(self, running: Sequence[Request], *, is_idle: bool) -> Settled | None:
        """Let grammars catch up with their tokens, for a short while.

        None while a newest token is still in flight: no step can go on from there. One without that row would be of
        no use, since it would make streams with a grammar half as fast as others.
        is_idle: there is nothing else to do.
        """
        rows = [request for request in running if request.grammar is not None]
        if any(request.num_unread_tokens for request in rows):
            return None
        is_idle = is_idle and len(rows) == len(running)
        _await_ready(self._all.values() if is_idle else rows, _IDLE_PATIENCE_S if is_idle else _PATIENCE_S)
        found = Settled()
        for request in self._all.values():
            grammar = request.grammar
            if grammar is None or not grammar.is_ready:
                continue
            if grammar.error is not None:
                text = f"The grammar of this request cannot be followed: {grammar.error}"
                found.failed.append((request, error_info(InvalidRequestError(text))))
                continue
            if forced := grammar.take_jump_forward():
                found.forced.append((request, forced))
            if grammar.is_over:
                found.over.append(request)
            elif request.request_id in self._preparing:
                found.prepared.append(request)
        for request in found.prepared:
            self.remove(request)
        return found


def _await_ready(requests: Iterable[Request], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for request in requests:
        if request.grammar is not None and not request.grammar.is_ready:
            request.grammar.wait(max(0.0, deadline - time.monotonic()))
