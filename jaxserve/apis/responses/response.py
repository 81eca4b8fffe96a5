"""The response object, whole and while it comes into being."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxserve.apis.responses.items import Item, OutputItem
from jaxserve.apis.responses.schema import FunctionTool, TextOptions
from jaxserve.apis.schema.common import Timing, UnixTime
from jaxserve.frontend.handle import TokenCounts
from jaxserve.frontend.request import ReasoningEffort

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseError(msgspec.Struct):
    """The reason why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ReasoningEcho(msgspec.Struct):
    effort: ReasoningEffort | None = None
    summary: None = None


class ResponseInputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: Annotated[int, Meta(description="Always 0: cache writes are not counted.")] = 0


class ResponseOutputDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Token counts; reasoning is part of the output."""

    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response, with the settings that made it."""

    id: str
    object: Literal["response"] = "response"
    created_at: UnixTime
    completed_at: int | None = None
    status: ResponseStatus = "in_progress"
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: Annotated[
        bool,
        Meta(
            description="As in the request, where null is true. A response has at most one call all the same if that is null, "
            "`tool_choice` is `required`, and the tool format is `generic`."
        ),
    ]
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningEcho
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: str | dict[str, Any]
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metrics: Timing = msgspec.UNSET
    metadata: dict[str, str]


class DeletedResponse(msgspec.Struct):
    """The answer to a deletion."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct):
    """The number of tokens of the prompt that a request would have."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ItemList(msgspec.Struct, kw_only=True):
    """A page of the items that a response was given."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


def response_usage(counts: TokenCounts) -> ResponseUsage:
    """Return the counts as responses report them."""
    return ResponseUsage(
        input_tokens=counts.num_prompt,
        input_tokens_details=ResponseInputDetails(counts.num_cached),
        output_tokens=counts.num_completion,
        output_tokens_details=ResponseOutputDetails(counts.num_reasoning),
        total_tokens=counts.num_prompt + counts.num_completion,
    )
