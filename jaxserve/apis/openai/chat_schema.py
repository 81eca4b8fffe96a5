"""`POST /v1/chat/completions`: request, reply and chunk."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

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
    messages: Annotated[list[ChatMessage], MESSAGES, Meta(description="The conversation so far.")]
    max_tokens: Annotated[
        int | None, Bound("value", 1), Meta(description="The older name of `max_completion_tokens`.")
    ] = None
    max_completion_tokens: Annotated[
        int | None,
        Bound("value", 1),
        Meta(
            description="Most tokens to generate, reasoning among them; goes before `max_tokens`. Without either: as many as fit."
        ),
    ] = None
    logprobs: Annotated[bool | None, Meta(description="Log-probabilities of the reply's tokens.")] = None
    top_logprobs: Annotated[
        int | None,
        Bound("value", 0, "max_top_logprobs"),
        Meta(description="Most likely tokens to tell in the place of each; only with `logprobs`."),
    ] = None
    tools: Annotated[
        list[ToolDefinition] | None,
        Bound("items", 0, "max_tools"),
        Meta(description="Functions that the model may call."),
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        Meta(
            description="`none`, `auto`, `required`, or an object that names a function; the last two force a call whose arguments obey the function's schema. Without it: `auto`."
        ),
    ] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="False: at most one call in a reply.")] = None
    reasoning_effort: Annotated[
        ReasoningEffort | None,
        Meta(description="Handed to the chat template, which must know it; `none` asks for no reasoning."),
    ] = None
    thinking_token_budget: Annotated[
        int | None, THINKING_BUDGET, Meta(description="Reasoning is ended after so many tokens.")
    ] = None
    include_reasoning: Annotated[
        bool | None, Meta(description="False: reasoning is generated and counted, but not told.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Further variables of the chat template.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None,
        Meta(description="Whether the prompt ends with the begin of an assistant's message. Without it: it does."),
    ] = None
    continue_final_message: Annotated[
        bool | None, Meta(description="The reply continues the last message, which is the assistant's.")
    ] = None
    documents: Annotated[list[dict[str, Any]] | None, Meta(description="Handed to the chat template.")] = None
    prediction: Annotated[
        Prediction | None,
        Meta(
            description="Drafts are taken from it where the server makes any (`--num-speculative-tokens`); the reply is the same."
        ),
    ] = None

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
    bytes: Annotated[list[int], Meta(description="The token's bytes, exactly; its text may be half a character.")]


class ContentLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: Annotated[list[int], Meta(description="The token's bytes, exactly; its text may be half a character.")]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct):
    content: list[ContentLogprob]
    refusal: None = None


class ReplyFunction(msgspec.Struct):
    name: str
    arguments: Annotated[str, Meta(description="JSON.")]


class ReplyToolCall(msgspec.Struct, kw_only=True):
    id: Annotated[str, Meta(description="To be repeated in the `tool_call_id` of the result.")]
    type: str = "function"
    function: ReplyFunction


class ReplyMessage(msgspec.Struct):
    role: str
    content: str | None
    refusal: None = None
    reasoning: Annotated[str | msgspec.UnsetType, Meta(description="What the model thought, where it marks that.")] = (
        msgspec.UNSET
    )
    reasoning_content: Annotated[str | msgspec.UnsetType, Meta(description="The same under its older name.")] = (
        msgspec.UNSET
    )
    tool_calls: Annotated[list[ReplyToolCall] | msgspec.UnsetType, Meta(description="Absent without calls.")] = (
        msgspec.UNSET
    )


class ChatChoice(msgspec.Struct):
    index: int
    message: ReplyMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Annotated[str, Meta(description="`stop`, `length` or `tool_calls`.")]
    stop_reason: Annotated[
        str | int | None,
        Meta(description="The stop string or token id that ended the reply; null for its natural end."),
    ]


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: Annotated[int, Meta(description="Seconds since 1970.")]
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: Annotated[str, Meta(description="Changes when weights, precision, mesh or versions do.")]
    service_tier: None = None
    prompt_logprobs: Annotated[
        list[dict[str, PromptLogprob] | None] | msgspec.UnsetType, Meta(description="Only when it was asked for.")
    ] = msgspec.UNSET
    metrics: Annotated[RequestTiming | msgspec.UnsetType, Meta(description="Only with `return_metrics`.")] = (
        msgspec.UNSET
    )


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
    reasoning_content: Annotated[str | None, Meta(description="The same under its older name.")] = None
    tool_calls: list[DeltaToolCall] | None = None


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: Annotated[str | None, Meta(description="In the last chunk of the choice.")]
    stop_reason: Annotated[str | int | msgspec.UnsetType | None, Meta(description="Only beside a finish_reason.")] = (
        msgspec.UNSET
    )


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: Annotated[list[ChatChunkChoice], Meta(description="One; none in the chunk of the usage.")]
    system_fingerprint: str
    usage: Annotated[
        Usage | msgspec.UnsetType | None, Meta(description="Absent unless `include_usage` asked for it.")
    ] = msgspec.UNSET
    metrics: Annotated[RequestTiming | msgspec.UnsetType, Meta(description="Only with `return_metrics`.")] = (
        msgspec.UNSET
    )
