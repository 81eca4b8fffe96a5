"""`POST /v1/chat/completions`: request, reply and chunk."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from jaxserve.apis.schema.common import CommonFields, PromptLogprob, check_common
from jaxserve.apis.schema.usage import Usage
from jaxserve.bounds import Bound
from jaxserve.config import LimitsConfig
from jaxserve.errors import InvalidRequestError
from jaxserve.frontend.handle import RequestTiming
from jaxserve.frontend.messages import ChatMessage
from jaxserve.frontend.request import MESSAGES, THINKING_BUDGET, ReasoningEffort
from jaxserve.frontend.tools import ToolDefinition


class PredictedPart(msgspec.Struct, kw_only=True):
    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct, kw_only=True):
    """What most of the reply is expected to be, as a text that is only revised."""

    type: Literal["content"]
    content: str | list[PredictedPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(CommonFields, kw_only=True):
    messages: Annotated[list[ChatMessage], MESSAGES]
    """The conversation so far."""
    max_tokens: Annotated[int | None, Bound("value", 1)] = None
    """The older name of `max_completion_tokens`."""
    max_completion_tokens: Annotated[int | None, Bound("value", 1)] = None
    """Most tokens to generate, reasoning among them; goes before `max_tokens`. Without either: as many as fit."""
    logprobs: bool | None = None
    """Log-probabilities of the reply's tokens."""
    top_logprobs: Annotated[int | None, Bound("value", 0, "max_top_logprobs")] = None
    """Most likely tokens to tell in the place of each; only with `logprobs`."""
    tools: Annotated[list[ToolDefinition] | None, Bound("items", 0, "max_tools")] = None
    """Functions that the model may call."""
    tool_choice: str | dict[str, Any] | None = None
    """`none`, `auto`, `required`, or an object that names a function; the last two force a call whose arguments obey the function's schema. Without it: `auto`."""
    parallel_tool_calls: bool | None = None
    """False: at most one call in a reply."""
    reasoning_effort: ReasoningEffort | None = None
    """Handed to the chat template, which must know it; `none` asks for no reasoning."""
    thinking_token_budget: Annotated[int | None, THINKING_BUDGET] = None
    """Reasoning is ended after so many tokens."""
    include_reasoning: bool | None = None
    """False: reasoning is generated and counted, but not told."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the begin of an assistant's message. Without it: it does."""
    continue_final_message: bool | None = None
    """The reply continues the last message, which is the assistant's."""
    documents: list[dict[str, Any]] | None = None
    """Handed to the chat template."""
    prediction: Prediction | None = None
    """Drafts are taken from it where the server makes any (`--num-speculative-tokens`); the reply is the same."""

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def check_chat(request: ChatRequest, limits: LimitsConfig) -> None:
    """Raise InvalidRequestError for fields out of their bounds, and for options that need others."""
    check_common(request, limits)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("When using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    """The token's bytes, exactly; its text may be half a character."""


class ContentLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    """The token's bytes, exactly; its text may be half a character."""
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct):
    content: list[ContentLogprob]
    refusal: None = None


class ReplyFunction(msgspec.Struct):
    name: str
    arguments: str
    """JSON."""


class ReplyToolCall(msgspec.Struct, kw_only=True):
    id: str
    """To be repeated in the `tool_call_id` of the result."""
    type: str = "function"
    function: ReplyFunction


class ReplyMessage(msgspec.Struct):
    role: str
    content: str | None
    refusal: None = None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    """What the model thought, where it marks that."""
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    """The same under its older name."""
    tool_calls: list[ReplyToolCall] | msgspec.UnsetType = msgspec.UNSET
    """Absent without calls."""


class ChatChoice(msgspec.Struct):
    index: int
    message: ReplyMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    stop_reason: str | int | None
    """The stop string or token id that ended the reply; null for its natural end."""


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    """Seconds since 1970."""
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    """Changes when weights, precision, mesh or versions do."""
    service_tier: None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    """Only when it was asked for."""
    metrics: RequestTiming | msgspec.UnsetType = msgspec.UNSET
    """Only with `return_metrics`."""


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
    """In the last chunk of the choice."""
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    """Only beside a finish_reason."""


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    """One; none in the chunk of the usage."""
    system_fingerprint: str
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    """Absent unless `include_usage` asked for it."""
    metrics: RequestTiming | msgspec.UnsetType = msgspec.UNSET
    """Only with `return_metrics`."""
