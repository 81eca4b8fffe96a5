"""`POST /v1/chat/completions`: request, reply and chunk."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.server.schema import limits
from jaxserve.server.schema.checks import check_range
from jaxserve.server.schema.common import CommonFields, check_common
from jaxserve.server.schema.unsupported import refuse
from jaxserve.server.schema.usage import Usage
from jaxserve.types import MAX_TOP_LOGPROBS


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None
    audio: Any = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatRequest(CommonFields, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def check_chat(request: ChatRequest) -> None:
    """Check what needs neither model nor tokenizer."""
    check_common(request)
    check_messages(request.messages)
    check_template_kwargs(request.chat_template_kwargs)
    for name in ("max_tokens", "max_completion_tokens"):
        check_range(name, getattr(request, name), 1, 2**63 - 1)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("When using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    check_range("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)


def check_template_kwargs(kwargs: dict[str, Any] | None) -> None:
    """Refuse oversized template variables."""
    size = len(msgspec.json.encode(kwargs or {}))
    if size > limits.MAX_TEMPLATE_KWARGS_CHARS:
        raise InvalidRequestError(
            f"Invalid value for 'chat_template_kwargs': at most {limits.MAX_TEMPLATE_KWARGS_CHARS} characters "
            f"of JSON, got {size}.",
            param="chat_template_kwargs",
        )


def check_messages(messages: list[ChatMessage]) -> None:
    """Refuse an empty or oversized conversation and parts we cannot read, naming their place."""
    if not 1 <= len(messages) <= limits.MAX_MESSAGES:
        raise InvalidRequestError(
            f"Invalid value for 'messages': must hold 1 to {limits.MAX_MESSAGES} messages, got {len(messages)}.",
            param="messages",
        )
    for i, message in enumerate(messages):
        for name in ("tool_calls", "function_call", "audio"):
            if getattr(message, name):
                raise refuse(f"messages[{i}].{name}")
        if message.content is None and message.role != "assistant":
            raise InvalidRequestError(
                f"Invalid value for 'messages[{i}].content': a {message.role} message needs a string or text parts.",
                param=f"messages[{i}].content",
            )
        if isinstance(message.content, list):
            for j, part in enumerate(message.content):
                if part.type not in ("text", "input_text", "output_text"):
                    raise refuse(f"messages[{i}].content[{j}].type={part.type[: limits.MAX_ECHOED_CHARS]}")
                if part.text is None:
                    raise InvalidRequestError(
                        f"Missing required parameter: 'messages[{i}].content[{j}].text'.",
                        param=f"messages[{i}].content[{j}].text",
                    )


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """The conversation as a chat template reads it: fields that were not given are absent."""
    rendered = []
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": message.content if message.content else ""}
        if isinstance(message.content, list):
            fields["content"] = [{"type": "text", "text": part.text} for part in message.content]
        extras = {
            "name": message.name,
            "tool_call_id": message.tool_call_id,
            "reasoning": message.reasoning,
            "reasoning_content": message.reasoning_content,
        }
        fields |= {name: value for name, value in extras.items() if value is not None}
        rendered.append(fields)
    return rendered


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct):
    content: list[ContentLogprob]
    refusal: None = None


class ReplyMessage(msgspec.Struct):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ReplyMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str
    stop_reason: str | int | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    service_tier: None = None


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    """Only beside a finish_reason."""


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    """Absent unless `include_usage` asked for it."""
