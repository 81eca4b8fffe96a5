"""The format of one response, from its first event to its last state."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from jaxserve.apis.openai.logprobs import chat_logprobs
from jaxserve.apis.responses import events
from jaxserve.apis.responses.output import OutputItems, PlacedLogprob
from jaxserve.apis.responses.response import (
    IncompleteDetails,
    ResponseError,
    ResponseObject,
    ResponseStatus,
    response_usage,
)
from jaxserve.errors import RateLimitError, RequestError
from jaxserve.frontend.choices.choice_stream import OutputDelta
from jaxserve.frontend.handle import RequestTiming, TokenCounts
from jaxserve.frontend.tokenization import Tokenization

_ERROR_CODES: Final[dict[type[RequestError], str]] = {RateLimitError: "rate_limit_exceeded"}


class ResponseFormatter:
    """The events and the reply of one response.

    `keep` stores a state that clients may see, and gets True with the first one. Pushed on an exit stack, it ends the
    response when the client leaves or an error ends the request: `forget` removes it where the client got no id.
    """

    def __init__(
        self,
        response: ResponseObject,
        tokens: Tokenization,
        *,
        num_top_logprobs: int | None,
        timing: Callable[[], RequestTiming] | None,
        keep: Callable[[ResponseObject, bool], None],
        forget: Callable[[str], object],
    ) -> None:
        """`response` is in progress. `timing`: the times so far, if the request asks for them."""
        self._response = response
        self._tokenizer = tokens.tokenizer
        self._num_top_logprobs = num_top_logprobs
        self._timing = timing
        self._keep = keep
        self._forget = forget
        self._numbers = itertools.count()
        self._output = OutputItems(tokens.output_format.new_call_id, self._numbers)
        self._is_cut = False
        self._is_known = False
        self._is_over = False

    def __enter__(self) -> ResponseFormatter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is not None and issubclass(kind, asyncio.CancelledError | ConnectionResetError):
            self.cancel()
        elif kind is not None:
            self._forget(self.id)

    @property
    def id(self) -> str:
        return self._response.id

    def begin(self) -> ResponseObject:
        """Return the response as it is before anything is generated, and store it."""
        self.publish(self._response)
        return self._response

    def opening(self) -> list[msgspec.Struct]:
        response = self.begin()
        return [
            events.ResponseCreated(response, next(self._numbers)),
            events.ResponseInProgress(response, next(self._numbers)),
        ]

    def chunks(self, delta: OutputDelta, counts: TokenCounts | None) -> Sequence[msgspec.Struct]:
        seen = self._output.take(delta.content_events, self._logprobs(delta))
        if delta.finish_reason is None:
            return seen
        self._is_cut = delta.finish_reason == "length"
        return seen + self._output.finish("incomplete" if self._is_cut else "completed")

    def closing(self, counts: TokenCounts) -> list[msgspec.Struct]:
        response = self._finished(counts)
        self.publish(response)
        last = events.ResponseIncomplete if self._is_cut else events.ResponseCompleted
        return [last(response, next(self._numbers))]

    def reply(self, choices: Sequence[Sequence[OutputDelta]], counts: TokenCounts) -> ResponseObject:
        """Return the whole reply; `publish` stores it."""
        for delta in choices[0]:
            self.chunks(delta, None)
        return self._finished(counts)

    def cancel(self) -> None:
        """End a response that its client no longer waits for. One that no client has seen is not stored."""
        if self._is_known and not self._is_over:
            self.publish(self._state("cancelled"))

    def fail(self, error: RequestError) -> msgspec.Struct:
        """Return the last event of a response that fails, and store its state."""
        response = self._state("failed")
        response.error = ResponseError(_ERROR_CODES.get(type(error), "server_error"), error.message)
        self.publish(response)
        return events.ResponseFailed(response, next(self._numbers))

    def publish(self, response: ResponseObject) -> None:
        """Store a state of the response. Only on the event loop: the store has no lock."""
        self._keep(response, not self._is_known)
        self._is_known = True
        self._is_over = response.status != "in_progress"

    def _finished(self, counts: TokenCounts) -> ResponseObject:
        response = self._state("incomplete" if self._is_cut else "completed")
        response.completed_at = None if self._is_cut else int(time.time())
        response.incomplete_details = IncompleteDetails("max_output_tokens") if self._is_cut else None
        response.usage = response_usage(counts)
        if self._timing is not None:
            response.metrics = self._timing()
        return response

    def _state(self, status: ResponseStatus) -> ResponseObject:
        return msgspec.structs.replace(self._response, status=status, output=self._output.items("incomplete"))

    def _logprobs(self, delta: OutputDelta) -> list[PlacedLogprob]:
        if self._num_top_logprobs is None:
            return []
        scored = chat_logprobs(self._tokenizer, [content.token for content in delta.content], self._num_top_logprobs)
        return [(entry, content.end) for entry, content in zip(scored.content, delta.content, strict=True)]
