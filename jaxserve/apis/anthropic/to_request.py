"""Translation of Anthropic's requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final, TypeGuard, TypeVar

from jaxserve.apis.anthropic.schema import (
    FileSource,
    ImageInput,
    InputBlock,
    MessagesRequest,
    PromptRequest,
    TextInput,
    ThinkingInput,
    ToolResultInput,
    ToolUseInput,
    UrlSource,
)
from jaxserve.apis.openai.response_format import format_constraint
from jaxserve.apis.schema.common import shared_fields
from jaxserve.bounds import Bound
from jaxserve.config import LimitsConfig
from jaxserve.errors import invalid
from jaxserve.frontend.checks import check_bound, refuse
from jaxserve.frontend.images.source import ImageSource
from jaxserve.frontend.messages import (
    CalledFunction,
    ChatMessage,
    ContentPart,
    FunctionDefinition,
    MessageToolCall,
    ToolChoice,
)
from jaxserve.frontend.request import Conversation, FieldNames, GenerationRequest

NAMES: Final = FieldNames(
    function="tools[{}]",
    parameters="input_schema",
    reasoning_effort="output_config.effort",
    thinking="thinking.type",
    thinking_budget="thinking.budget_tokens",
)
_FORMAT: Final = "output_config.format"
_MAX_TYPE_CHARS: Final = 64
Block = TypeVar("Block", TextInput, TextInput | ImageInput)
_MODES: Final = {"auto": "auto", "any": "required", "tool": "function", "none": "none"}


def to_request(body: MessagesRequest, limits: LimitsConfig) -> GenerationRequest:
    """Translate a request that `check_anthropic` has passed. Raises InvalidRequestError."""
    format_ = body.output_config.format if body.output_config is not None else None
    formatted = None if format_ is None else format_constraint(format_.type, format_.schema, _FORMAT, "schema")
    stop = [*(body.stop_sequences or ()), *body.stop_strings]
    check_bound(Bound("items", 0, "max_stop_strings"), "stop", stop, limits)
    request = GenerationRequest(
        prompt=to_conversation(body),
        max_tokens=body.max_tokens,
        is_limit_clipped=True,
        constraint=body.constraint(formatted, _FORMAT),
        **shared_fields(body) | {"stop": stop},
    )
    request.check(limits)
    return request


def to_conversation(body: PromptRequest) -> Conversation:
    """Translate the prompt. Raises InvalidRequestError."""
    messages, choice, thinking = chat_messages(body), body.tool_choice, body.thinking
    is_single = None if choice is None else choice.disable_parallel_tool_use
    return Conversation(
        messages=messages,
        continue_final_message=bool(messages) and messages[-1].role == "assistant",
        functions=[
            FunctionDefinition(
                name=tool.name or "", description=tool.description, parameters=tool.input_schema, strict=tool.strict
            )
            for tool in body.tools or ()
        ],
        tool_choice=ToolChoice()
        if choice is None
        else ToolChoice(_MODES[choice.type], choice.name, choice.name or choice.type),
        is_parallel=None if is_single is None else not is_single,
        reasoning_effort=body.output_config.effort if body.output_config is not None else None,
        thinking=None if thinking is None or thinking.type == "adaptive" else thinking.type == "enabled",
        thinking_budget=thinking.budget_tokens if thinking is not None else None,
        template_variables=body.chat_template_kwargs or {},
        names=NAMES,
        images=image_sources(body),
    )


def chat_messages(request: PromptRequest) -> list[ChatMessage]:
    """Return the turns as chat messages; results of calls are separate messages."""
    messages = [ChatMessage(role="system", content=_content(_texts(request.system)))] if request.system else []
    for role, turns in groupby(request.messages, key=lambda message: message.role):
        blocks: list[InputBlock] = []
        for turn in turns:
            blocks += _texts(turn.content) if isinstance(turn.content, str) else turn.content
        if role == "assistant":
            messages.append(_assistant(blocks))
        else:
            messages += _user_messages(role, blocks)
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant" and (not last.content or last.tool_calls):
        raise invalid(
            "messages",
            "the last one must be a user's, or an assistant's with text and without "
            "tool_use, which the reply continues",
        )
    return messages


def image_sources(request: PromptRequest) -> list[ImageSource]:
    """Return the images of the turns, in their order. Raises InvalidRequestError."""
    sources = []
    for i, message in enumerate(request.messages):
        for j, block in enumerate(message.content if isinstance(message.content, list) else ()):
            place = f"messages[{i}].content[{j}]"
            if isinstance(block, ImageInput):
                sources.append(_image_source(block, place))
            elif isinstance(block, ToolResultInput) and isinstance(block.content, list):
                shown = enumerate(block.content)
                sources += [_image_source(part, f"{place}.content[{k}]") for k, part in shown if _is_image(part)]
    return sources


def _is_image(block: TextInput | ImageInput) -> TypeGuard[ImageInput]:
    return isinstance(block, ImageInput)


def _image_source(block: ImageInput, place: str) -> ImageSource:
    """Return the image of a block at `place`. Raises InvalidRequestError for a stored file."""
    place, source = f"{place}.source", block.source
    if isinstance(source, FileSource):
        raise refuse(f"{place}.type", "file")
    if isinstance(source, UrlSource):
        return ImageSource(source.url, f"{place}.url")
    kind = source.media_type.partition(";")[0][:_MAX_TYPE_CHARS].replace(",", "")
    return ImageSource(f"data:{kind};base64,{source.data}", f"{place}.data")


def _texts(content: str | Sequence[Block] | None) -> Sequence[Block | TextInput]:
    return [TextInput(text=content)] if isinstance(content, str) else content or []


def _content(blocks: Sequence[TextInput | ImageInput]) -> str | list[ContentPart]:
    """Return a single text as a string, since not every template reads lists."""
    parts = [
        ContentPart(type="text", text=block.text) if isinstance(block, TextInput) else ContentPart(type="image_url")
        for block in blocks
    ]
    return parts[0].text or "" if len(parts) == 1 and not parts[0].is_image else parts or ""


def _assistant(blocks: Iterable[InputBlock]) -> ChatMessage:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        if isinstance(block, TextInput):
            texts.append(block)
        elif isinstance(block, ThinkingInput):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseInput):
            function = CalledFunction(name=block.name, arguments=block.input)
            calls.append(MessageToolCall(id=block.id, function=function))
    reasoning = "".join(thoughts) or None
    return ChatMessage(role="assistant", content=_content(texts), reasoning=reasoning, tool_calls=calls or None)


def _user_messages(role: Any, blocks: Sequence[InputBlock]) -> Iterator[ChatMessage]:
    """Yield the messages of a user or of the system, in the order of their blocks."""
    if not blocks:
        yield ChatMessage(role=role, content="")
    for _, run in groupby(blocks, key=lambda block: isinstance(block, ToolResultInput)):
        alike = list(run)
        shown = [block for block in alike if isinstance(block, TextInput | ImageInput)]
        if shown:
            yield ChatMessage(role=role, content=_content(shown))
        for block in alike:
            if isinstance(block, ToolResultInput):
                error = [TextInput(text="Error:")] if block.is_error else []
                content = _content([*error, *_texts(block.content)])
                yield ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=content)
