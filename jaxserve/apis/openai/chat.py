"""`POST /v1/chat/completions`."""

from __future__ import annotations

from functools import partial

import msgspec
from aiohttp import web

from jaxserve.apis.openai.chat_schema import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatRequest,
    ChoiceLogprobs,
    Delta,
    check_chat,
)
from jaxserve.apis.openai.deltas import MessageDeltas, message_of
from jaxserve.apis.openai.logprobs import chat_logprobs, prompt_logprobs
from jaxserve.apis.routes import Route
from jaxserve.apis.schema.usage import Usage
from jaxserve.frontend.choice_stream import OutputDelta, events_of
from jaxserve.frontend.handle import Job, answer
from jaxserve.frontend.prepare import make_chat_job
from jaxserve.frontend.tools import named_function
from jaxserve.http.body import read_body
from jaxserve.http.sse import Framing
from jaxserve.http.state import STATE, ServerState
from jaxserve.ipc.messages import ModelInfo


@partial(
    Route,
    "POST",
    "/v1/chat/completions",
    tag="OpenAI",
    request=ChatRequest,
    reply=ChatCompletion,
    event=ChatChunk,
    last_event="[DONE]",
)
async def chat_completions(http: web.Request) -> web.StreamResponse:
    """The next message of a conversation."""
    state = http.app[STATE]
    request = await read_body(http, ChatRequest)
    check_chat(request, state.limits)
    state.require_model(request.model)
    model_info = state.client.require_generation()
    with state.client.admission(request.num_choices):
        job = await make_chat_job(state, model_info, request)
        return await answer(http, request, job, ChatFormat(request, job, state, model_info))


class ChatFormat:
    """Chunks and replies of one chat request, all with the same id and time."""

    def __init__(self, request: ChatRequest, job: Job, state: ServerState, model_info: ModelInfo) -> None:
        self._request = request
        self._job = job
        self._tokenizer = state.tokenization.tokenizer
        self._messages = [
            MessageDeltas(
                state.tokenization.output_format.new_call_id, shows_reasoning=request.include_reasoning is not False
            )
            for _ in range(request.num_choices)
        ]
        self._heading = state.heading("chatcmpl", model_info, request.model)
        self._no_usage = None if request.wants_usage else msgspec.UNSET

    framing = Framing()

    def opening(self) -> list[msgspec.Struct]:
        return [
            self._chunk([ChatChunkChoice(index, Delta(role="assistant", content=""), None, None)], None)
            for index in range(self._request.num_choices)
        ]

    def chunks(self, piece: OutputDelta, usage: Usage | None) -> list[msgspec.Struct]:
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
        chunk.metrics = self._job.told_timing(self._request)
        return [chunk]

    def reply(self, choices: list[list[OutputDelta]], usage: Usage) -> msgspec.Struct:
        return ChatCompletion(
            **self._heading,
            choices=[
                ChatChoice(
                    index=index,
                    message=message_of(self._messages[index].of(events_of(pieces))),
                    logprobs=self._logprobs(pieces),
                    finish_reason=self._finish_reason(pieces[-1]),
                    stop_reason=pieces[-1].stop_reason,
                )
                for index, pieces in enumerate(choices)
            ],
            usage=usage,
            prompt_logprobs=prompt_logprobs(self._tokenizer, choices[0][0].prompt, self._request.prompt_logprobs),
            metrics=self._job.told_timing(self._request),
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatChunk:
        return ChatChunk(**self._heading, choices=choices, usage=self._no_usage if usage is None else usage)

    def _deltas(self, piece: OutputDelta) -> list[Delta]:
        if piece.events is None:
            return [Delta(content=piece.text)] if piece.text else []
        return self._messages[piece.index].of(piece.events)

    def _finish_reason(self, piece: OutputDelta) -> str:
        """A reply that ends by itself and has calls ends for their sake, unless the request named the function."""
        has_calls = self._messages[piece.index].has_calls and named_function(self._request.tool_choice) is None
        return "tool_calls" if has_calls and piece.finish_reason == "stop" else piece.finish_reason or "stop"

    def _logprobs(self, pieces: list[OutputDelta]) -> ChoiceLogprobs | None:
        num_top = self._request.num_top_logprobs
        if num_top is None:
            return None
        tokens = [token for piece in pieces for token in piece.tokens]
        return chat_logprobs(self._tokenizer, tokens, num_top)
