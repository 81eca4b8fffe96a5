"""`POST /v1/chat/completions`: request, reply and chunk."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.server.schema.checks import check_range
from jaxserve.server.schema.common import CommonFields, PromptLogprob, check_common, check_listed_logprobs
from jaxserve.server.schema.conversation import ReasoningEffort, check_conversation
from jaxserve.server.schema.messages import ChatMessage
from jaxserve.server.schema.tools import ToolChoice, ToolDefinition
from jaxserve.server.schema.usage import Usage
from jaxserve.types import MAX_TOP_LOGPROBS


class ChatRequest(CommonFields, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        """None: no log-probabilities; 0: of the chosen tokens alone."""
        if not self.logprobs:
            return None
        return len(self.logprob_token_ids or ()) or self.top_logprobs or 0

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def check_chat(request: ChatRequest) -> None:
    """Check what needs neither model nor tokenizer."""
    check_common(request)
    check_conversation(request.messages, request)
    for name in ("max_tokens", "max_completion_tokens"):
        check_range(name, getattr(request, name), 1, 2**63 - 1)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("When using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    check_listed_logprobs(request, bool(request.logprobs))
    check_range("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)


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


class ReplyFunction(msgspec.Struct):
    name: str
    arguments: str


class ReplyToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: ReplyFunction


class ReplyMessage(msgspec.Struct):
    role: str
    content: str | None
    refusal: None = None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    """The same under its older name."""
    tool_calls: list[ReplyToolCall] | msgspec.UnsetType = msgspec.UNSET


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
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    """Only when it was asked for."""


class DeltaFunction(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The first of a call has everything and no arguments; the others have the index and more arguments."""

    index: int
    id: str | None = None
    type: str | None = None
    function: DeltaFunction


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The same under its older name."""
    tool_calls: list[DeltaToolCall] | None = None


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
