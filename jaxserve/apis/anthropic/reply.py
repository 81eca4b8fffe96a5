"""Replies of Anthropic's API: messages, the events of their streams, counts, errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxserve.apis.schema.common import Timing
from jaxserve.errors import RequestError
from jaxserve.frontend.handle import TokenCounts

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """The text of the reply."""

    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """The reasoning before it."""

    thinking: str
    signature: Annotated[str, Meta(description="The SHA-256 of the reasoning, in hexadecimal digits.")]


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of one of the request's tools."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(msgspec.Struct):
    """Kinds of generated tokens."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """Token counts."""

    input_tokens: Annotated[int, Meta(description="Prompt tokens that were not cached.")]
    cache_read_input_tokens: Annotated[int, Meta(description="Prompt tokens from the prefix cache.")]
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    cache_creation_input_tokens: Annotated[int, Meta(description="Always 0.")] = 0


class Message(msgspec.Struct, kw_only=True):
    """A reply, whole or (in `message_start`) not yet begun."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    metrics: Timing = msgspec.UNSET


class TokenCount(msgspec.Struct):
    """The number of tokens of a conversation's prompt."""

    input_tokens: int


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """The first event."""

    message: Message


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """A block begins, empty but for a call's id and name."""

    index: int
    content_block: Block


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """More of a text."""

    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """More of the reasoning."""

    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    """The last of the reasoning."""

    signature: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """More of a call's input."""

    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """More of the block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """The block is complete."""

    index: int


BlockEvent = BlockStart | BlockDelta | BlockStop


class MessageEnd(msgspec.Struct):
    """The reason why the message ended; null before its end."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """The end, with the counts of the whole message."""

    delta: MessageEnd
    usage: MessageUsage
    metrics: Timing = msgspec.UNSET


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event."""


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    """The connection is alive."""


class AnthropicErrorDetail(msgspec.Struct):
    """The kind of the error and its text."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, tag_field="type", tag="error"):
    """A refusal; in a stream, its last event."""

    error: AnthropicErrorDetail
    request_id: str


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def anthropic_error(error: RequestError, request_id: str) -> AnthropicError:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`."""
    return AnthropicError(
        AnthropicErrorDetail(_ERROR_TYPES.get(error.status, "invalid_request_error"), error.message), request_id
    )


def message_usage(counts: TokenCounts) -> MessageUsage:
    """Return the counts as Anthropic reports them: cached tokens are no input tokens."""
    return MessageUsage(
        input_tokens=counts.num_prompt - counts.num_cached,
        cache_read_input_tokens=counts.num_cached,
        output_tokens=counts.num_completion,
        output_tokens_details=OutputTokensDetails(counts.num_reasoning),
    )
