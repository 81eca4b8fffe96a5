"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid

import msgspec
from aiohttp import web

from jaxserve.server.body import read_body
from jaxserve.server.chat_job import make_chat_job
from jaxserve.server.deltas import MessageDeltas, message_of
from jaxserve.server.generation import Job, answer
from jaxserve.server.logprobs import chat_logprobs, prompt_logprobs
from jaxserve.server.request_id import adopt_request_id
from jaxserve.server.routes import Route
from jaxserve.server.schema.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatRequest,
    ChoiceLogprobs,
    Delta,
    check_chat,
)
from jaxserve.server.schema.common import PromptLogprob
from jaxserve.server.schema.timing import RequestTiming
from jaxserve.server.schema.tools import named_function
from jaxserve.server.schema.usage import Usage
from jaxserve.server.sse import Framing
from jaxserve.server.state import STATE
from jaxserve.server.stream import Piece
from jaxserve.server.tokenization import Tokenization


async def chat_completions(http: web.Request) -> web.StreamResponse:
    state = http.app[STATE]
    request = await read_body(http, ChatRequest)
    adopt_request_id(http, request.request_id)
    check_chat(request, state.limits)
    state.require_model(request.model)
    facts = state.client.require_generation()
    with state.client.admission(request.num_choices):
        job = await make_chat_job(state, facts, request)
        spelling = ChatFormat(request, job, state.model_name, state.fingerprint(facts), state.tokenization)
        return await answer(http, request, job, spelling)


class ChatFormat:
    """Chunks and replies of one chat request, all with the same id and time."""

    def __init__(self, request: ChatRequest, job: Job, model: str, fingerprint: str, tokens: Tokenization) -> None:
        self._request = request
        self._job = job
        self._tokenizer = tokens.tokenizer
        self._messages = [
            MessageDeltas(tokens.dialect.new_call_id, shows_reasoning=request.include_reasoning is not False)
            for _ in range(request.num_choices)
        ]
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._fingerprint = fingerprint
        self._no_usage = None if request.wants_usage else msgspec.UNSET

    framing = Framing()

    def opening(self) -> list[msgspec.Struct]:
        return [
            self._chunk([ChatChunkChoice(index, Delta(role="assistant", content=""), None, None)], None)
            for index in range(self._request.num_choices)
        ]

    def chunks(self, piece: Piece, usage: Usage | None) -> list[msgspec.Struct]:
        deltas = self._deltas(piece)
        is_end = piece.finish_reason is not None
        if (is_end and deltas and deltas[-1].tool_calls) or (not deltas and (is_end or piece.tokens)):
            deltas.append(Delta())
        if not deltas:
            return []
        choices = [ChatChunkChoice(piece.index, delta, None, None) for delta in deltas]
        choices[-1].logprobs = self._logprobs([piece])
        if is_end:
            choices[-1].finish_reason = self._finish_reason(piece)
            choices[-1].stop_reason = piece.stop_reason
        return [self._chunk([choice], usage) for choice in choices]

    def closing(self, usage: Usage) -> list[msgspec.Struct]:
        if not self._request.wants_usage and not self._request.return_metrics:
            return []
        chunk = self._chunk([], usage)
        chunk.metrics = self._timing()
        return [chunk]

    def reply(self, choices: list[list[Piece]], usage: Usage) -> msgspec.Struct:
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                ChatChoice(
                    index=index,
                    message=message_of([delta for piece in pieces for delta in self._deltas(piece)]),
                    logprobs=self._logprobs(pieces),
                    finish_reason=self._finish_reason(pieces[-1]),
                    stop_reason=pieces[-1].stop_reason,
                )
                for index, pieces in enumerate(choices)
            ],
            usage=usage,
            system_fingerprint=self._fingerprint,
            prompt_logprobs=self._prompt_logprobs(choices[0][0]),
            metrics=self._timing(),
        )

    def _timing(self) -> RequestTiming | msgspec.UnsetType:
        return self._job.timing() if self._request.return_metrics else msgspec.UNSET

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            system_fingerprint=self._fingerprint,
            usage=self._no_usage if usage is None else usage,
        )

    def _deltas(self, piece: Piece) -> list[Delta]:
        if piece.events is None:
            return [Delta(content=piece.text)] if piece.text else []
        return self._messages[piece.index].of(piece.events)

    def _finish_reason(self, piece: Piece) -> str:
        """A reply that ends by itself and has calls ends for their sake, unless the request named the function."""
        has_calls = self._messages[piece.index].has_calls and named_function(self._request.tool_choice) is None
        return "tool_calls" if has_calls and piece.finish_reason == "stop" else piece.finish_reason or "stop"

    def _prompt_logprobs(self, first: Piece) -> list[dict[str, PromptLogprob] | None] | msgspec.UnsetType:
        if self._request.prompt_logprobs is None:
            return msgspec.UNSET
        return prompt_logprobs(self._tokenizer, first.prompt, self._request.prompt_logprobs)

    def _logprobs(self, pieces: list[Piece]) -> ChoiceLogprobs | None:
        num_top = self._request.num_top_logprobs
        if num_top is None:
            return None
        tokens = [token for piece in pieces for token in piece.tokens]
        return chat_logprobs(self._tokenizer, tokens, num_top)


ROUTES = (
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        summary="The next message of a conversation.",
        tag="OpenAI",
        request=ChatRequest,
        reply=ChatCompletion,
        event=ChatChunk,
        last_event="[DONE]",
    ),
)
