"""`POST /v1/responses`: the request, and what it asks of the chat that answers it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from jaxserve.apis.responses.input import InputItem
from jaxserve.apis.schema.common import GenerationFields
from jaxserve.bounds import Bound
from jaxserve.errors import InvalidRequestError, invalid, unsupported
from jaxserve.frontend.checks import check_count, missing, refuse, shorten
from jaxserve.frontend.request import ReasoningEffort

LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDED: Final = (LOGPROBS, "reasoning.encrypted_content")
"""The second asks for reasoning that can be sent back: it is, in the clear, with or without."""
_MOVED: Final = {
    "logprobs": f"see `include`, '{LOGPROBS}'",
    "max_completion_tokens": "see `max_output_tokens`",
    "max_tokens": "see `max_output_tokens`",
    "messages": "see `input`",
    "n": "a request has one response",
    "prompt_logprobs": "log-probabilities are of the output",
    "response_format": "see `text.format`",
}
_TOOL_OPTIONS: Final = ("defer_loading", "output_schema", "allowed_callers", "is_async")
_MAX_PAIRS: Final = 16
_MAX_KEY_CHARS: Final = 64
_MAX_VALUE_CHARS: Final = 512


class FunctionTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call."""

    type: Annotated[str, Meta(description="`function`; built-in tools of OpenAI are not supported.")]
    name: str | None = None
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Meta(description="A JSON schema.")] = None
    strict: Annotated[
        bool | None,
        Meta(description="True: arguments match the schema even if `tool_choice` does not force the call."),
    ] = None
    defer_loading: Annotated[bool | None, Meta(description="Rejected if true: the prompt contains every function.")] = (
        None
    )
    output_schema: Annotated[dict[str, Any] | None, Meta(description="Rejected: results are not checked.")] = None
    allowed_callers: Annotated[list[str] | None, Meta(description="Only `direct`.")] = None
    is_async: Annotated[bool | None, Meta(description="Rejected if true.")] = msgspec.field(default=None, name="async")


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form of the reply's text."""

    type: Annotated[str, Meta(description="`text`, `json_object` or `json_schema`.")]
    name: Annotated[str | None, Meta(description="Returned unchanged.")] = None
    description: Annotated[str | None, Meta(description="Returned unchanged.")] = None
    schema: Annotated[dict[str, Any] | None, Meta(description="JSON schema; only with `json_schema`.")] = None
    strict: Annotated[bool | None, Meta(description="Accepted without effect: the schema is always enforced.")] = None


class TextOptions(msgspec.Struct, kw_only=True, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, Meta(description="Accepted without effect.")] = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: Annotated[ReasoningEffort | None, Meta(description="Variable of the chat template, which must use it.")] = (
        None
    )
    summary: Annotated[
        Literal["auto", "concise", "detailed"] | None,
        Meta(description="Only `auto`: reasoning is returned whole, not summarised."),
    ] = None
    generate_summary: Annotated[
        Literal["auto", "concise", "detailed"] | None, Meta(description="Older name of `summary`.")
    ] = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: Annotated[
        bool | None, Meta(description="Padding against traffic analysis; accepted without effect.")
    ] = None


class ResponsesRequest(GenerationFields, kw_only=True):
    """A request for one response. Sampling options beyond OpenAI's mean what they mean for chat completions."""

    input: Annotated[str | list[InputItem], Meta(description="A text, or the items of a conversation.")]
    instructions: Annotated[
        str | None, Meta(description="System message before all input; a later response does not inherit it.")
    ] = None
    max_output_tokens: Annotated[
        int | None,
        Bound("value", 1),
        Meta(
            description="Maximum number of tokens to generate, including reasoning. Default: as many as fit the context."
        ),
    ] = None
    max_tool_calls: Annotated[
        int | None,
        Bound("value", 1),
        Meta(description="Limit of calls to built-in tools; without effect, since there are none."),
    ] = None
    top_logprobs: Annotated[
        int | None,
        Bound("value", 0, "max_top_logprobs"),
        Meta(
            description="Number of most likely tokens to return at each position; only if `include` requests log-probabilities."
        ),
    ] = None
    include: Annotated[
        list[str] | None,
        Meta(
            description="`message.output_text.logprobs`: return log-probabilities of the text. `reasoning.encrypted_content`: accepted without effect."
        ),
    ] = None
    text: Annotated[
        TextOptions | None, Meta(description="Response format: any text, JSON, or JSON that matches a schema.")
    ] = None
    tools: Annotated[
        list[FunctionTool] | None,
        Bound("items", 0, "max_tools"),
        Meta(description="Functions that the model may call."),
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, Meta(description="`none`, `auto`, `required`, a function, or `allowed_tools`.")
    ] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="False: a response has at most one call.")] = None
    reasoning: Annotated[ReasoningOptions | None, Meta(description="Options of the model's reasoning.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Further variables of the chat template.")
    ] = None
    metadata: Annotated[
        dict[str, str] | None, Bound("items", 0, _MAX_PAIRS), Meta(description="Returned unchanged.")
    ] = None
    previous_response_id: Annotated[
        str | None,
        Meta(
            description="Id of the response that this one continues: the conversation begins with its items and those before it."
        ),
    ] = None
    store: Annotated[
        bool | None,
        Meta(description="False: the response cannot be retrieved or continued later. Default: true."),
    ] = None
    truncation: Annotated[str | None, Meta(description="Only `disabled`: input that is too long is rejected.")] = None
    background: Annotated[
        bool | None,
        Meta(
            description="True: reply at once and generate afterwards; retrieve the response later. Not with `stream`; requires `store`."
        ),
    ] = None
    stream_options: Annotated[
        ResponseStreamOptions | None, Meta(description="Options of a stream; only with `stream`.")
    ] = None
    user: Annotated[str | None, Meta(description="Returned unchanged.")] = None
    safety_identifier: Annotated[str | None, Meta(description="Returned unchanged.")] = None
    prompt_cache_key: Annotated[
        str | None, Meta(description="Returned unchanged; the prefix cache does not need it.")
    ] = None

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


def check_moved(names: Iterable[str]) -> None:
    """Refuse fields of chat completions that the responses API calls otherwise, or does not have."""
    for name in names:
        if name in _MOVED:
            raise unsupported(name, f"is not of the responses API: {_MOVED[name]}")


def check_responses(request: ResponsesRequest) -> None:
    """Raise InvalidRequestError for values and combinations that are not supported."""
    if request.top_logprobs and not request.wants_logprobs:
        raise InvalidRequestError(f"When using `top_logprobs`, `include` must hold '{LOGPROBS}'.", param="top_logprobs")
    for i, name in enumerate(request.include or ()):
        if name not in _INCLUDED:
            raise refuse(f"include[{i}]", name)
    if request.truncation not in (None, "disabled"):
        raise unsupported("truncation", f"must be disabled, got {shorten(request.truncation)}")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("Stream options can only be defined when `stream=True`.", param="stream_options")
    for name in ("summary", "generate_summary"):
        if getattr(request.reasoning, name, None) not in (None, "auto"):
            raise refuse(f"reasoning.{name}")
    if request.background and (request.stream or not request.is_stored):
        raise invalid("background", "not together with `stream`, and not without `store`")
    _check_tools(request.tools or [])
    _check_metadata(request.metadata or {})


def _check_tools(tools: list[FunctionTool]) -> None:
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise unsupported(
                f"tools[{i}].type", f"must be 'function', got {shorten(tool.type)}: nothing else runs on this server"
            )
        if tool.name is None:
            raise missing(f"tools[{i}].name")
        for name in _TOOL_OPTIONS:
            if getattr(tool, name) not in (None, False, ["direct"]):
                raise refuse(f"tools[{i}].{name.removeprefix('is_')}")


def _check_metadata(metadata: dict[str, str]) -> None:
    check_count("metadata", max(map(len, metadata), default=0), _MAX_KEY_CHARS, "characters in a key")
    check_count("metadata", max(map(len, metadata.values()), default=0), _MAX_VALUE_CHARS, "characters in a value")
