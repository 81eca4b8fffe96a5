"""`POST /v1/messages` and `POST /v1/messages/count_tokens`, as Anthropic's clients speak."""

from __future__ import annotations

import uuid
from functools import partial

import msgspec
from aiohttp import web

from jaxserve.apis.anthropic.blocks import BlockEvents, blocks_of
from jaxserve.apis.anthropic.reply import (
    AnthropicError,
    Block,
    BlockEvent,
    Message,
    MessageDelta,
    MessageEnd,
    MessageStart,
    MessageStop,
    Ping,
    StopReason,
    TokenCount,
    anthropic_error,
    message_usage,
)
from jaxserve.apis.anthropic.schema import (
    CountTokensRequest,
    MessagesRequest,
    check_anthropic,
)
from jaxserve.apis.anthropic.to_request import NAMES, chat_request, counted_request
from jaxserve.apis.openai.chat_schema import check_chat
from jaxserve.apis.routes import ApiStyle, Route
from jaxserve.apis.schema.renaming import renamed
from jaxserve.apis.schema.usage import Usage
from jaxserve.frontend.choice_stream import OutputDelta, events_of
from jaxserve.frontend.handle import Job, answer
from jaxserve.frontend.prepare import make_chat_job
from jaxserve.frontend.request import encode_conversation
from jaxserve.http.body import read_body
from jaxserve.http.reply import json_reply
from jaxserve.http.request_id import request_id_of
from jaxserve.http.sse import Framing, frame
from jaxserve.http.state import STATE, ServerState

_STYLE = ApiStyle(error_body=anthropic_error, request_id_header="request-id")


@partial(
    Route,
    "POST",
    "/v1/messages",
    tag="Anthropic",
    style=_STYLE,
    request=MessagesRequest,
    reply=Message,
    event=MessageStart | Ping | BlockEvent | MessageDelta | MessageStop | AnthropicError,
)
async def messages(http: web.Request) -> web.StreamResponse:
    """The next message of a conversation, as Anthropic's clients ask for it."""
    state = http.app[STATE]
    request = await read_body(http, MessagesRequest)
    check_anthropic(request, state.limits)
    state.require_model(request.model)
    model_info = state.client.require_generation()
    with state.client.admission(1):
        with renamed(NAMES):
            chat = chat_request(request, state.tokenization)
            check_chat(chat, state.limits)
            job = await make_chat_job(state, model_info, chat, default_max_tokens=request.max_tokens)
        return await answer(http, chat, job, MessageFormat(request, job, state, request_id_of(http)))


@partial(
    Route,
    "POST",
    "/v1/messages/count_tokens",
    tag="Anthropic",
    style=_STYLE,
    request=CountTokensRequest,
    reply=TokenCount,
)
async def count_tokens(http: web.Request) -> web.StreamResponse:
    """How many tokens a conversation's prompt has."""
    state = http.app[STATE]
    request = await read_body(http, CountTokensRequest)
    check_anthropic(request, state.limits)
    state.require_model(request.model)
    state.client.require_ready()
    with renamed(NAMES):
        chat = counted_request(request, state.tokenization)
        check_chat(chat, state.limits)
        prompt = await encode_conversation(state.tokenization, chat.messages, chat, max_tokens=state.max_body_size)
    return json_reply(TokenCount(len(prompt)))


class MessageFormat:
    """Events and reply of one request."""

    def __init__(self, request: MessagesRequest, job: Job, state: ServerState, request_id: str) -> None:
        self.framing = Framing(keep_alive=frame(Ping()), end=b"", error=partial(anthropic_error, request_id=request_id))
        thinking = request.thinking
        self._blocks = BlockEvents(
            state.tokenization.output_format.new_call_id,
            shows_thinking=thinking is None or thinking.display != "omitted",
        )
        self._is_window_short = job.requests[0].sampling.max_tokens < request.max_tokens
        self._model = state.shown_name(request.model)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._job = job
        self._request = request
        self._last: OutputDelta | None = None

    def opening(self) -> list[msgspec.Struct]:
        return [MessageStart(self._message([], MessageEnd(None, None), self._job.usage())), Ping()]

    def chunks(self, piece: OutputDelta, usage: Usage | None) -> list[msgspec.Struct]:
        self._last = piece
        seen = self._blocks.of(piece.told)
        return [*seen, *self._blocks.end()] if piece.finish_reason is not None else [*seen]

    def closing(self, usage: Usage) -> list[msgspec.Struct]:
        assert self._last is not None, "a stream ends with its choice"
        return [
            MessageDelta(self._end(self._last), message_usage(usage), self._job.told_timing(self._request)),
            MessageStop(),
        ]

    def reply(self, choices: list[list[OutputDelta]], usage: Usage) -> msgspec.Struct:
        (pieces,) = choices
        content = blocks_of([*self._blocks.of(events_of(pieces)), *self._blocks.end()])
        message = self._message(content, self._end(pieces[-1]), usage)
        message.metrics = self._job.told_timing(self._request)
        return message

    def _message(self, content: list[Block], end: MessageEnd, usage: Usage) -> Message:
        return Message(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
            usage=message_usage(usage),
        )

    def _end(self, last: OutputDelta) -> MessageEnd:
        if isinstance(last.stop_reason, str):
            return MessageEnd("stop_sequence", last.stop_reason)
        reason: StopReason = "tool_use" if self._blocks.has_calls else "end_turn"
        if last.finish_reason == "length":
            reason = "model_context_window_exceeded" if self._is_window_short else "max_tokens"
        return MessageEnd(reason, None)
