"""`POST /v1/messages` and `POST /v1/messages/count_tokens`, as Anthropic's clients send them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial

import msgspec

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
from jaxserve.apis.anthropic.schema import CountTokensRequest, MessagesRequest, check_anthropic
from jaxserve.apis.anthropic.to_request import to_conversation, to_request
from jaxserve.apis.routes import ApiStyle, Call, Generated, Route
from jaxserve.config import LimitsConfig
from jaxserve.frontend.choices.choice_stream import OutputDelta
from jaxserve.frontend.choices.parsed_reply import events_of
from jaxserve.frontend.encode import encode_conversation
from jaxserve.frontend.frontend import Frontend
from jaxserve.frontend.handle import RequestHandle, TokenCounts
from jaxserve.frontend.prepare import prepare
from jaxserve.frontend.request import Conversation, GenerationRequest

_STYLE = ApiStyle(error_body=anthropic_error, request_id_header="request-id", ping=Ping())


@partial(
    Route,
    "POST",
    "/v1/messages",
    tag="Anthropic",
    style=_STYLE,
    reply=Message,
    event=MessageStart | Ping | BlockEvent | MessageDelta | MessageStop | AnthropicError,
)
async def messages(call: Call, body: MessagesRequest) -> Generated:
    """Generate the next message of a conversation, in Anthropic's format."""
    request = await call.off_loop(_checked_request, body, call.frontend.limits)
    call.cleanup.enter_context(call.frontend.admitted(request))
    handle = call.cleanup.enter_context(await prepare(call.frontend, request))
    return Generated(
        handle=handle, formatter=MessageFormatter(body, handle, call.frontend), is_streamed=bool(body.stream)
    )


@partial(
    Route,
    "POST",
    "/v1/messages/count_tokens",
    tag="Anthropic",
    style=_STYLE,
    reply=TokenCount,
)
async def count_tokens(call: Call, body: CountTokensRequest) -> TokenCount:
    """Count the tokens of a conversation's prompt."""
    frontend = call.frontend
    conversation = await call.off_loop(_checked_conversation, body, frontend.limits)
    frontend.require_model(body.model)
    model_info = frontend.client.require_ready()
    images = await frontend.images.load(conversation.images, model_info.images)
    return TokenCount(len(await encode_conversation(frontend.tokenization, conversation, images=images)))


def _checked_request(body: MessagesRequest, limits: LimitsConfig) -> GenerationRequest:
    """Return the request for the engine. Raises InvalidRequestError."""
    check_anthropic(body)
    return to_request(body, limits)


def _checked_conversation(body: CountTokensRequest, limits: LimitsConfig) -> Conversation:
    """Return the conversation whose tokens are counted. Raises InvalidRequestError."""
    check_anthropic(body)
    conversation = to_conversation(body)
    conversation.check(limits)
    return conversation


class MessageFormatter:
    """Events and reply of one request."""

    def __init__(self, body: MessagesRequest, handle: RequestHandle, frontend: Frontend) -> None:
        thinking = body.thinking
        self._blocks = BlockEvents(
            frontend.tokenization.output_format.new_call_id,
            shows_thinking=thinking is None or thinking.display != "omitted",
        )
        self._is_window_short = handle.requests[0].sampling.max_tokens < body.max_tokens
        self._model = frontend.shown_name(body.model)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._handle = handle
        self._body = body
        self._last: OutputDelta | None = None

    def opening(self) -> list[msgspec.Struct]:
        return [MessageStart(self._message([], MessageEnd(None, None), self._handle.counts())), Ping()]

    def chunks(self, delta: OutputDelta, counts: TokenCounts | None) -> list[msgspec.Struct]:
        self._last = delta
        seen = self._blocks.of(delta.content_events)
        return [*seen, *self._blocks.end()] if delta.finish_reason is not None else [*seen]

    def closing(self, counts: TokenCounts) -> list[msgspec.Struct]:
        assert self._last is not None, "a stream ends with its choice"
        return [
            MessageDelta(self._end(self._last), message_usage(counts), self._body.reported(self._handle.timing())),
            MessageStop(),
        ]

    def reply(self, choices: Sequence[Sequence[OutputDelta]], counts: TokenCounts) -> msgspec.Struct:
        (deltas,) = choices
        content = blocks_of([*self._blocks.of(events_of(deltas)), *self._blocks.end()])
        message = self._message(content, self._end(deltas[-1]), counts)
        message.metrics = self._body.reported(self._handle.timing())
        return message

    def _message(self, content: list[Block], end: MessageEnd, counts: TokenCounts) -> Message:
        return Message(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
            usage=message_usage(counts),
        )

    def _end(self, last: OutputDelta) -> MessageEnd:
        if isinstance(last.stop_reason, str):
            return MessageEnd("stop_sequence", last.stop_reason)
        reason: StopReason = "tool_use" if self._blocks.has_calls else "end_turn"
        if last.finish_reason == "length":
            reason = "model_context_window_exceeded" if self._is_window_short else "max_tokens"
        return MessageEnd(reason, None)
