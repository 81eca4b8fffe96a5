"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: what Anthropic's clients ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from jaxserve.apis.schema.common import GenerationFields
from jaxserve.bounds import Bound
from jaxserve.errors import invalid
from jaxserve.frontend.checks import missing, refuse


class TextInput(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text; `cache_control` beside it changes nothing, since every prefix is cached."""

    text: str


class Base64Source(msgspec.Struct, kw_only=True, tag_field="type", tag="base64"):
    """The content of an image file."""

    media_type: Annotated[str, Meta(description="`image/png`, `image/jpeg`, ...; the file itself decides.")]
    data: Annotated[str, Meta(description="Base64.")]


class UrlSource(msgspec.Struct, kw_only=True, tag_field="type", tag="url"):
    """An image at an address."""

    url: Annotated[
        str, Meta(description="http(s), if `--allowed-media-domains` has the host; or a `data:` URL with base64.")
    ]


class FileSource(msgspec.Struct, kw_only=True, tag_field="type", tag="file"):
    """Rejected: this server stores no files."""

    file_id: str


class ImageInput(msgspec.Struct, kw_only=True, tag_field="type", tag="image"):
    """An image, for models that read images."""

    source: Base64Source | UrlSource | FileSource


class ThinkingInput(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning of an earlier reply; the chat template decides what of it is shown."""

    thinking: str
    signature: Annotated[str | None, Meta(description="Ignored.")] = None


class ToolUseInput(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call that the model made."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultInput(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_result"):
    """The result of a call."""

    tool_use_id: str
    content: str | list[TextInput | ImageInput] | None = None
    is_error: Annotated[bool | None, Meta(description="True: the prompt shows `Error: ` before the result.")] = None


InputBlock = TextInput | ImageInput | ThinkingInput | ToolUseInput | ToolResultInput


class MessageInput(msgspec.Struct, kw_only=True):
    """One turn. Neighbours of one role are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class ToolInput(msgspec.Struct, kw_only=True):
    """A function of the client's."""

    type: Annotated[str | None, Meta(description="`custom`; built-in tools of Anthropic are rejected.")] = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    input_examples: Annotated[list[Any] | None, Meta(description="Rejected: chat templates cannot show them.")] = None
    defer_loading: Annotated[bool | None, Meta(description="Rejected if true: tool search is not supported.")] = None
    allowed_callers: Annotated[list[str] | None, Meta(description="Only `direct`.")] = None


class ToolChoiceInput(msgspec.Struct, kw_only=True):
    """The choice of the tools that the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, Meta(description="Name of the function, with the type `tool`.")] = None
    disable_parallel_tool_use: Annotated[bool | None, Meta(description="True: at most one call.")] = None


class ThinkingConfig(msgspec.Struct, kw_only=True):
    """The model's reasoning before its answer; `adaptive` leaves it to the model and its template."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, Meta(description="Number of tokens after which reasoning ends.")] = None
    display: Annotated[
        Literal["summarized", "omitted"] | None,
        Meta(description="`omitted` removes the text of the thinking from the reply. It is never summarised."),
    ] = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """A JSON schema that the reply's text is constrained by."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """The form of the reply, and how much effort goes into it."""

    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None, Meta(description="The template's `reasoning_effort`.")
    ] = None
    format: OutputFormat | None = None


Messages = Annotated[
    list[MessageInput],
    Bound("items", 1, "max_messages"),
    Meta(description="Messages of the conversation so far. A final assistant message is continued."),
]
SystemInput = Annotated[str | list[TextInput] | None, Meta(description="System message.")]
Tools = Annotated[
    list[ToolInput] | None, Bound("items", 0, "max_tools"), Meta(description="Functions that the model may call.")
]
ToolChoice = Annotated[
    ToolChoiceInput | None,
    Meta(description="Choice of tools; `any` and `tool` force a call with input that matches the tool's schema."),
]
Thinking = Annotated[
    ThinkingConfig | None, Meta(description="Turns reasoning on or off. Default: the chat template decides.")
]
Output = Annotated[OutputConfig | None, Meta(description="Response format.")]
TemplateKwargs = Annotated[
    dict[str, Any] | None, Meta(description="Variables of the chat template; not part of Anthropic's API.")
]


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """A conversation. `None` means: not given."""

    messages: Messages
    model: Annotated[str | None, Meta(description="A served model name.")] = None
    system: SystemInput = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    thinking: Thinking = None
    output_config: Output = None
    chat_template_kwargs: TemplateKwargs = None


class MessagesRequest(GenerationFields, kw_only=True):
    """A conversation to go on with. Fields that are not Anthropic's are those of the other endpoints."""

    messages: Messages
    max_tokens: Annotated[
        int,
        Bound("value", 0),
        Meta(
            description="Maximum number of tokens to generate, less if the context ends before. 0: only compute the prompt, for the prefix cache."
        ),
    ]
    system: SystemInput = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    thinking: Thinking = None
    output_config: Output = None
    chat_template_kwargs: TemplateKwargs = None
    stop_sequences: Annotated[
        list[str] | None,
        Bound("items", 0, "max_stop_strings"),
        Bound("characters", 1, "max_stop_chars"),
        Meta(description="Texts that end the reply, which does not contain them; added to those of `stop`."),
    ] = None


PromptRequest = CountTokensRequest | MessagesRequest

_ROLES_OF: Final[Mapping[type[msgspec.Struct], tuple[str, ...]]] = {
    TextInput: ("user", "assistant", "system"),
    ImageInput: ("user",),
    ThinkingInput: ("assistant",),
    ToolUseInput: ("assistant",),
    ToolResultInput: ("user",),
}


def check_anthropic(request: PromptRequest) -> None:
    """Raise InvalidRequestError for blocks, tools and options that do not go together."""
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
            raise refuse(f"{place}.type", tool.type)
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
