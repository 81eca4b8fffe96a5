"""`POST /v1/chat/completions`: request, reply and chunk."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxserve.apis.schema.common import (
    EXPERTS_FILE,
    CommonFields,
    Fingerprint,
    PromptLogprobs,
    ReplyTokenIds,
    Timing,
    UnixTime,
    check_common,
)
from jaxserve.apis.schema.usage import Usage
from jaxserve.bounds import Bound
from jaxserve.errors import InvalidRequestError
from jaxserve.frontend.messages import ChatMessage, ToolDefinition
from jaxserve.frontend.request import MESSAGES, THINKING_BUDGET, ReasoningEffort


class PredictedPart(msgspec.Struct, kw_only=True):
    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct, kw_only=True):
    """A text that the reply is expected to revise."""

    type: Literal["content"]
    content: str | list[PredictedPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ThinkingSwitch(msgspec.Struct, kw_only=True):
    """The switch of a model's reasoning; `adaptive` and `auto` leave it to the chat template."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int | None, Meta(description="Number of tokens after which reasoning ends.")] = None

    @property
    def is_on(self) -> bool | None:
        return {"enabled": True, "disabled": False}.get(self.type)


class ChatRequest(CommonFields, kw_only=True):
    messages: Annotated[list[ChatMessage], MESSAGES, Meta(description="Messages of the conversation so far.")]
    max_tokens: Annotated[int | None, Bound("value", 1), Meta(description="Older name of `max_completion_tokens`.")] = (
        None
    )
    max_completion_tokens: Annotated[
        int | None,
        Bound("value", 1),
        Meta(
            description="Maximum number of tokens to generate, including reasoning; overrides `max_tokens`. Default: as many as fit the context."
        ),
    ] = None
    logprobs: Annotated[bool | None, Meta(description="True: return log-probabilities of the reply's tokens.")] = None
    top_logprobs: Annotated[
        int | None,
        Bound("value", 0, "max_top_logprobs"),
        Meta(description="Number of most likely tokens to return at each position; only with `logprobs`."),
    ] = None
    tools: Annotated[
        list[ToolDefinition] | None,
        Bound("items", 0, "max_tools"),
        Meta(description="Functions that the model may call."),
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        Meta(
            description="`none`, `auto`, `required`, or an object that names a function (these two force a call with arguments that match the function's schema) or has the type `allowed_tools`. Default: `auto`."
        ),
    ] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="False: a reply has at most one call.")] = None
    reasoning_effort: Annotated[
        ReasoningEffort | None,
        Meta(description="Variable of the chat template, which must use it; `none` turns reasoning off."),
    ] = None
    thinking: Annotated[
        ThinkingSwitch | None, Meta(description="Switches the model's reasoning on or off, as in Anthropic's API.")
    ] = None
    thinking_token_budget: Annotated[
        int | None, THINKING_BUDGET, Meta(description="Number of tokens after which reasoning ends.")
    ] = None
    include_reasoning: Annotated[
        bool | None, Meta(description="False: reasoning is generated and counted, but not returned.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Further variables of the chat template.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None,
        Meta(description="False: the prompt does not open an assistant message. Default: true."),
    ] = None
    continue_final_message: Annotated[
        bool | None, Meta(description="True: the reply continues the last message, which must be the assistant's.")
    ] = None
    documents: Annotated[list[dict[str, Any]] | None, Meta(description="Documents for the chat template.")] = None
    prediction: Annotated[
        Prediction | None,
        Meta(
            description="Expected text of the reply: speculative decoding takes drafts from it (`--num-speculative-tokens`). The reply does not change."
        ),
    ] = None

    @property
    def reasoning_budget(self) -> int | None:
        return self.thinking_token_budget or (self.thinking.budget_tokens if self.thinking is not None else None)

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def check_chat(request: ChatRequest) -> None:
    """Raise InvalidRequestError for options that need others."""
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError("When using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    if request.return_token_ids and request.include_reasoning is False:
        raise InvalidRequestError(
            "`return_token_ids` returns the tokens of reasoning too: it needs `include_reasoning` true.",
            param="return_token_ids",
        )
    check_common(request)


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: Annotated[list[int], Meta(description="Exact bytes of the token; its text may be half a character.")]


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct):
    content: list[ContentLogprob]
    refusal: None = None


class ReplyFunction(msgspec.Struct):
    name: str
    arguments: Annotated[str, Meta(description="JSON.")]


class ReplyToolCall(msgspec.Struct, kw_only=True):
    id: Annotated[str, Meta(description="Id to repeat in the `tool_call_id` of the result.")]
    type: str = "function"
    function: ReplyFunction


class ReplyMessage(msgspec.Struct):
    role: str
    content: str | None
    refusal: None = None
    reasoning: Annotated[
        str | msgspec.UnsetType, Meta(description="Reasoning of the model, if its output format marks it.")
    ] = msgspec.UNSET
    reasoning_content: Annotated[str | msgspec.UnsetType, Meta(description="Older name of `reasoning`.")] = (
        msgspec.UNSET
    )
    tool_calls: Annotated[
        list[ReplyToolCall] | msgspec.UnsetType, Meta(description="Tool calls; absent without calls.")
    ] = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ReplyMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Annotated[str, Meta(description="`stop`, `length` or `tool_calls`.")]
    stop_reason: Annotated[
        str | int | None,
        Meta(description="The stop string or token id that ended the reply; null for its natural end."),
    ]
    token_ids: ReplyTokenIds = msgspec.UNSET
    routed_experts: Annotated[
        str | msgspec.UnsetType, Meta(description=f"Only with `return_routed_experts`. {EXPERTS_FILE}")
    ] = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: UnixTime
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: Fingerprint
    service_tier: None = None
    prompt_logprobs: PromptLogprobs = msgspec.UNSET
    prompt_token_ids: Annotated[
        list[int] | msgspec.UnsetType,
        Meta(description="Only with `return_token_ids`."),
    ] = msgspec.UNSET
    metrics: Timing = msgspec.UNSET


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
    reasoning_content: Annotated[str | None, Meta(description="Older name of `reasoning`.")] = None
    tool_calls: list[DeltaToolCall] | None = None


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: Annotated[str | None, Meta(description="Null until the last chunk of the choice.")]
    stop_reason: Annotated[
        str | int | msgspec.UnsetType | None, Meta(description="Only together with `finish_reason`.")
    ] = msgspec.UNSET
    token_ids: ReplyTokenIds = msgspec.UNSET
    routed_experts: Annotated[
        str | msgspec.UnsetType,
        Meta(description=f"Only with `return_routed_experts`, in the last chunk of each choice. {EXPERTS_FILE}"),
    ] = msgspec.UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: Annotated[list[ChatChunkChoice], Meta(description="One choice; none in the usage chunk.")]
    system_fingerprint: str
    usage: Annotated[Usage | msgspec.UnsetType | None, Meta(description="Absent without `include_usage`.")] = (
        msgspec.UNSET
    )
    prompt_token_ids: Annotated[
        list[int] | msgspec.UnsetType,
        Meta(description="Only with `return_token_ids`, in the first chunk."),
    ] = msgspec.UNSET
    metrics: Timing = msgspec.UNSET
