"""One response from its first event to its last state."""

from __future__ import annotations

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
    ResponseFault,
    ResponseObject,
    ResponseStatus,
    response_usage,
)
from jaxserve.apis.schema.timing import RequestTiming
from jaxserve.apis.schema.usage import Usage
from jaxserve.errors import RateLimitError, RequestError
from jaxserve.frontend.choice_stream import OutputDelta
from jaxserve.frontend.tokenization import Tokenization
from jaxserve.http.sse import Framing

_FAULT_CODES: Final[dict[type[RequestError], str]] = {RateLimitError: "rate_limit_exceeded"}


class ResponseReply:
    """The events and the reply of one response.

    `keep` is told each of its states that a client may hear of, and whether it is the first one.
    """

    def __init__(
        self,
        response: ResponseObject,
        tokens: Tokenization,
        *,
        num_top_logprobs: int | None,
        timing: Callable[[], RequestTiming] | None,
        keep: Callable[[ResponseObject, bool], None],
    ) -> None:
        """`response` is in progress. `timing`: what it took, for those who want to know."""
        self._response = response
        self._tokenizer = tokens.tokenizer
        self._num_top_logprobs = num_top_logprobs
        self._timing = timing
        self._keep = keep
        self._numbers = itertools.count()
        self._output = OutputItems(tokens.output_format.new_call_id, self._numbers)
        self._is_cut = False
        self._is_known = False
        self._is_over = False

    @property
    def framing(self) -> Framing:
        return Framing(end=b"", error=self.fail)

    @property
    def id(self) -> str:
        return self._response.id

    def begin(self) -> ResponseObject:
        """The response as it is before anything is generated."""
        self._tell(self._response)
        return self._response

    def opening(self) -> list[msgspec.Struct]:
        response = self.begin()
        return [
            events.ResponseCreated(response, next(self._numbers)),
            events.ResponseInProgress(response, next(self._numbers)),
        ]

    def chunks(self, piece: OutputDelta, usage: Usage | None) -> Sequence[msgspec.Struct]:
        told = self._output.take(piece.told, self._logprobs(piece))
        if piece.finish_reason is None:
            return told
        self._is_cut = piece.finish_reason == "length"
        return told + self._output.finish("incomplete" if self._is_cut else "completed")

    def closing(self, usage: Usage) -> list[msgspec.Struct]:
        response = self._finished(usage)
        last = events.ResponseIncomplete if self._is_cut else events.ResponseCompleted
        return [last(response, next(self._numbers))]

    def reply(self, choices: list[list[OutputDelta]], usage: Usage) -> msgspec.Struct:
        for piece in choices[0]:
            self.chunks(piece, None)
        return self._finished(usage)

    def cancel(self) -> None:
        """Nobody wants the rest, if there is one. A response of which nobody has heard is not kept."""
        if self._is_known and not self._is_over:
            self._tell(self._state("cancelled"))

    def fail(self, error: RequestError) -> msgspec.Struct:
        """The last event of a response that fails."""
        response = self._state("failed")
        response.error = ResponseFault(_FAULT_CODES.get(type(error), "server_error"), error.message)
        self._tell(response)
        return events.ResponseFailed(response, next(self._numbers))

    def _finished(self, usage: Usage) -> ResponseObject:
        response = self._state("incomplete" if self._is_cut else "completed")
        response.completed_at = None if self._is_cut else int(time.time())
        response.incomplete_details = IncompleteDetails("max_output_tokens") if self._is_cut else None
        response.usage = response_usage(usage)
        if self._timing is not None:
            response.metrics = self._timing()
        self._tell(response)
        return response

    def _tell(self, response: ResponseObject) -> None:
        self._keep(response, not self._is_known)
        self._is_known = True
        self._is_over = response.status != "in_progress"

    def _state(self, status: ResponseStatus) -> ResponseObject:
        return msgspec.structs.replace(self._response, status=status, output=self._output.items("incomplete"))

    def _logprobs(self, piece: OutputDelta) -> list[PlacedLogprob]:
        if self._num_top_logprobs is None:
            return []
        spelled = chat_logprobs(self._tokenizer, [content.token for content in piece.content], self._num_top_logprobs)
        return [(entry, content.end) for entry, content in zip(spelled.content, piece.content, strict=True)]
