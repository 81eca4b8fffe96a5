"""Constrained decoding: which requests follow a grammar, and how long a step waits for their masks."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from jaxserve.errors import InvalidRequestError
from jaxserve.ipc.messages import AddRequest, ErrorInfo, Grammar
from jaxserve.sampling.params import needs_state
from jaxserve.scheduler.admission import error_info
from jaxserve.scheduler.request import GrammarState, Request
from jaxserve.types import RequestId

_MASK_WAIT_S: Final = 0.005
"""How long a step waits for the masks of its rows; a row whose mask is late misses the step."""
_IDLE_WAIT_S: Final = 0.02
"""The wait if there is nothing else to compute; then the engine looks for messages."""


class Grammars(Protocol):
    """Starts grammars."""

    def follow(
        self, grammar: Grammar, allowed_token_ids: Collection[int], *, jump_forward: bool = False
    ) -> GrammarState: ...


@dataclass(slots=True)
class GrammarEvents:
    """Changes of grammars since the last `poll`."""

    ready: list[RequestId] = field(default_factory=list)
    """Requests whose next mask is known to be ready from now on."""
    prepared: list[Request] = field(default_factory=list)
    """New requests whose first mask is ready."""
    jumped: list[tuple[Request, list[int]]] = field(default_factory=list)
    """Jump-forward tokens: the only ones that the grammar allows next."""
    terminated: list[Request] = field(default_factory=list)
    """Requests whose grammar allows no further token."""
    failed: list[tuple[Request, ErrorInfo]] = field(default_factory=list)


class ConstrainedDecoding:
    """The policy of grammars: it starts them, advances them, and knows which rows have no mask yet.

    Masks are made in threads. What they have done shows only after `poll`.
    """

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._active: dict[RequestId, Request] = {}
        """Requests whose grammar can change: all but those that wait for their first step."""
        self._preparing: set[RequestId] = set()
        """Requests that cannot wait for a step yet: their first mask is not ready."""
        self._late: set[Request] = set()
        """Started requests whose next mask is not known to be ready."""
        self.last_events: GrammarEvents | None = None
        """Returned by the last `poll`."""

    def __bool__(self) -> bool:
        return bool(self._active)

    def new_grammar(self, message: AddRequest) -> GrammarState | None:
        """Start the grammar of a new request; None if it has none."""
        if message.grammar is None or self._grammars is None:
            return None
        # Sampler state and log-probabilities are made from sampled tokens only; and a token at the end of a reply that was not
        # sampled would leave the one before it without experts.
        wants_more = message.sampling.num_top_logprobs is not None or message.returns_routed_experts
        jump_forward = not needs_state(message.sampling) and not wants_more
        return self._grammars.follow(
            message.grammar, message.sampling.allowed_token_ids or (), jump_forward=jump_forward
        )

    def prepare(self, request: Request) -> None:
        """Take a new request with a grammar, until `poll` returns it as prepared."""
        self._active[request.request_id] = request
        self._preparing.add(request.request_id)

    def start(self, request: Request) -> None:
        """Take a request that runs from now on: its grammar changes with every token."""
        if request.grammar is not None:
            self._active[request.request_id] = request

    def advance(self, request: Request, token: int) -> None:
        """Let the grammar of a running request take its newest token."""
        if request.grammar is not None:
            request.grammar.advance(token)
            self._late.add(request)

    def remove(self, request: Request) -> None:
        self._active.pop(request.request_id, None)
        self._preparing.discard(request.request_id)
        self._late.discard(request)

    def is_late(self, request: Request) -> bool:
        """Return True if the request has no mask for its next token."""
        return request in self._late

    def waits_for(self, running: Sequence[Request]) -> bool:
        """Return True if a request with a grammar has an unread token.

        No step can follow before it is read. A step without that row would be of no use, since it would make
        constrained streams half as fast as others.
        """
        return bool(self._active) and any(
            request.num_unread_tokens for request in running if request.grammar is not None
        )

    def poll(self, running: Sequence[Request], *, is_idle: bool) -> GrammarEvents:
        """Return what grammars have done. Waits a few milliseconds for the masks that are late, and for new grammars only if no
        running request can continue.

        is_idle: no other request can be computed.
        """
        rows = [request for request in running if request.grammar is not None]
        is_idle = is_idle and len(rows) == len(running)
        deadline = time.monotonic() + (_IDLE_WAIT_S if is_idle else _MASK_WAIT_S)
        has_mask = _await_ready(rows, deadline)
        if is_idle and not has_mask:
            _await_ready(self._active.values(), deadline)
        events = self.last_events = GrammarEvents()
        for request in self._active.values():
            grammar = request.grammar
            if grammar is None or not grammar.is_ready:
                continue
            events.ready.append(request.request_id)
            self._late.discard(request)
            if grammar.error is not None:
                text = f"The grammar of this request cannot be followed: {grammar.error}"
                events.failed.append((request, error_info(InvalidRequestError(text))))
                continue
            if tokens := grammar.take_jump_forward():
                events.jumped.append((request, tokens))
            if grammar.is_terminated:
                events.terminated.append(request)
            elif request.request_id in self._preparing:
                events.prepared.append(request)
        for request in events.prepared:
            self.remove(request)
        return events


def _await_ready(requests: Iterable[Request], deadline: float) -> bool:
    """Wait until all masks of `requests` are ready, at most until `deadline`; returns True if one is."""
    is_one_ready = False
    for request in requests:
        if request.grammar is None:
            continue
        if not request.grammar.is_ready:
            request.grammar.wait(max(0.0, deadline - time.monotonic()))
        is_one_ready = is_one_ready or request.grammar.is_ready
    return is_one_ready
