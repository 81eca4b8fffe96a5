"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: what Anthropic's clients ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from jaxserve.apis.schema.common import GenerationFields
from jaxserve.bounds import Bound
from jaxserve.config import LimitsConfig
from jaxserve.errors import invalid
from jaxserve.frontend.bounds import check_bounds
from jaxserve.frontend.checks import MAX_ECHOED_CHARS, missing, refuse


class TextInput(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text; `cache_control` beside it changes nothing, since every prefix is cached."""

    text: str


class ThinkingInput(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning of an earlier reply; the chat template decides what of it is shown."""

    thinking: str
    signature: str | None = None
    """Not looked at."""


class ToolUseInput(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call that the model made."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultInput(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_result"):
    """What a call gave."""

    tool_use_id: str
    content: str | list[TextInput] | None = None
    is_error: bool | None = None
    """Puts `Error: ` before the result: templates have no place of their own for it."""


InputBlock = TextInput | ThinkingInput | ToolUseInput | ToolResultInput


class MessageInput(msgspec.Struct, kw_only=True):
    """One turn. Neighbours of one role are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class ToolInput(msgspec.Struct, kw_only=True):
    """A function of the client's."""

    type: str | None = None
    """`custom`; tools that Anthropic runs are refused."""
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    input_examples: list[Any] | None = None
    """Refused: templates have no place for them."""
    defer_loading: bool | None = None
    """Refused when true: there is no search for tools."""
    allowed_callers: list[str] | None = None
    """Only `direct`."""


class ToolChoiceInput(msgspec.Struct, kw_only=True):
    """Whether and what the model calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """The function, with the type `tool`."""
    disable_parallel_tool_use: bool | None = None
    """One call at most."""


class ThinkingConfig(msgspec.Struct, kw_only=True):
    """Whether the model reasons before it answers; `adaptive` leaves it to the model and its template."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    """Reasoning is ended after so many tokens."""
    display: Literal["summarized", "omitted"] | None = None
    """`omitted` leaves the thinking's text out of the reply. It is never summarized."""


class OutputFormat(msgspec.Struct, kw_only=True):
    """A JSON schema that the reply's text is held to."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """The form of the reply, and how much effort goes into it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """The template's `reasoning_effort`; `max` is told it as `xhigh`."""
    format: OutputFormat | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """A conversation. `None` means: not given."""

    messages: Annotated[list[MessageInput], Bound("items", 1, "max_messages")]
    """The turns so far. An assistant's at the end is continued."""
    model: str | None = None
    """A name that is served."""
    system: str | list[TextInput] | None = None
    """The system's message."""
    tools: Annotated[list[ToolInput] | None, Bound("items", 0, "max_tools")] = None
    """Functions that the model may call."""
    tool_choice: ToolChoiceInput | None = None
    """Whether and what it calls; `any` and `tool` force a call whose input obeys the tool's schema."""
    thinking: ThinkingConfig | None = None
    """Whether it reasons first. Without it the template decides."""
    output_config: OutputConfig | None = None
    """The form of the reply."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template; not Anthropic's."""


class MessagesRequest(GenerationFields, kw_only=True):
    """A conversation to go on with. Fields that are not Anthropic's are those of the other endpoints."""

    messages: Annotated[list[MessageInput], Bound("items", 1, "max_messages")]
    """The turns so far. An assistant's at the end is continued."""
    max_tokens: Annotated[int, Bound("value", 0)]
    """Fewer where the context ends before. 0: the prompt is computed, so that the cache has it."""
    system: str | list[TextInput] | None = None
    """The system's message."""
    tools: Annotated[list[ToolInput] | None, Bound("items", 0, "max_tools")] = None
    """Functions that the model may call."""
    tool_choice: ToolChoiceInput | None = None
    """Whether and what it calls; `any` and `tool` force a call whose input obeys the tool's schema."""
    thinking: ThinkingConfig | None = None
    """Whether it reasons first. Without it the template decides."""
    output_config: OutputConfig | None = None
    """The form of the reply."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template; not Anthropic's."""
    stop_sequences: Annotated[
        list[str] | None, Bound("items", 0, "max_stop_strings"), Bound("characters", 1, "max_stop_chars")
    ] = None
    """Texts before which the reply ends, with those of `stop`."""


PromptRequest = CountTokensRequest | MessagesRequest

_ROLES_OF: Final[Mapping[type[msgspec.Struct], tuple[str, ...]]] = {
    TextInput: ("user", "assistant", "system"),
    ThinkingInput: ("assistant",),
    ToolUseInput: ("assistant",),
    ToolResultInput: ("user",),
}


def check_anthropic(request: PromptRequest, limits: LimitsConfig) -> None:
    """Check what a chat request would call by another name, or not know. Raises InvalidRequestError."""
    check_bounds(request, limits)
    for i, message in enumerate(request.messages):
        for j, block in enumerate(message.content if isinstance(message.content, list) else ()):
            if message.role not in _ROLES_OF[type(block)]:
                place = f"messages[{i}].content[{j}]"
                raise invalid(place, f"a message of role {message.role} holds no {block.__struct_config__.tag} block")
    _check_tools(request.tools or ())
    choice = request.tool_choice
    if choice is not None and (choice.type == "tool") != (choice.name is not None):
        raise invalid("tool_choice.name", "it goes with the type tool, and only with it")
    thinking = request.thinking
    if thinking is not None and thinking.budget_tokens is not None and thinking.type != "enabled":
        raise invalid("thinking.budget_tokens", "it goes with the type enabled, and only with it")


def _check_tools(tools: Sequence[ToolInput]) -> None:
    for i, tool in enumerate(tools):
        place = f"tools[{i}]"
        if tool.type not in (None, "custom"):
            raise refuse(f"{place}.type={tool.type[:MAX_ECHOED_CHARS]}")
        for name in ("name", "input_schema"):
            if getattr(tool, name) is None:
                raise missing(f"{place}.{name}")
        for name, is_asked in (
            ("input_examples", bool(tool.input_examples)),
            ("defer_loading", bool(tool.defer_loading)),
            ("allowed_callers", not {"direct"}.issuperset(tool.allowed_callers or ())),
        ):
            if is_asked:
                raise refuse(f"{place}.{name}")
