"""Translation of a request for a response and of the items before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from jaxserve.apis.openai.response_format import format_constraint
from jaxserve.apis.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputImage,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
)
from jaxserve.apis.responses.schema import FunctionTool, ResponsesRequest
from jaxserve.apis.schema.common import shared_fields
from jaxserve.config import LimitsConfig
from jaxserve.errors import invalid
from jaxserve.frontend.checks import shorten
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

NAMES: Final = FieldNames(prompt="input", function="tools[{}]", reasoning_effort="reasoning.effort")
_FORMAT: Final = "text.format"


def to_request(
    body: ResponsesRequest, items: Sequence[Item], limits: LimitsConfig, num_earlier: int = 0
) -> GenerationRequest:
    """Translate a request that `check_responses` has passed, to continue `items`. Raises InvalidRequestError.

    num_earlier: items at the start that are those of earlier responses.
    """
    messages = chat_messages(items)
    if body.instructions is not None:
        messages.insert(0, ChatMessage(role="system", content=body.instructions))
    functions = [
        FunctionDefinition(
            name=tool.name or "", description=tool.description, parameters=tool.parameters, strict=tool.strict
        )
        for tool in body.tools or ()
    ]
    format_ = body.text.format if body.text is not None else None
    formatted = None if format_ is None else format_constraint(format_.type, format_.schema, _FORMAT, "schema")
    request = GenerationRequest(
        prompt=Conversation(
            messages=messages,
            functions=functions,
            tool_choice=_tool_choice(body.tool_choice),
            is_parallel=body.parallel_tool_calls,
            reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
            template_variables=body.chat_template_kwargs or {},
            names=NAMES,
            images=image_sources(items, num_earlier),
        ),
        max_tokens=body.max_output_tokens,
        num_top_logprobs=body.top_logprobs or 0 if body.wants_logprobs else None,
        constraint=body.constraint(formatted, _FORMAT),
        **shared_fields(body),
    )
    request.check(limits)
    return request


def chat_messages(items: Sequence[Item]) -> list[ChatMessage]:
    """Return the conversation as chat messages: all that a model wrote in one turn is one message."""
    messages: list[ChatMessage | _Turn] = []
    turn: _Turn | None = None
    for item in items:
        if isinstance(item, FunctionCallOutputItem):
            messages.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=_content(item.output)))
            turn = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append(ChatMessage(role=item.role, content=_content(item.content)))
            turn = None
        else:
            if turn is None or (turn.content is not None and not isinstance(item, FunctionCallItem)):
                turn = _Turn()
                messages.append(turn)
            turn.add(item)
    return [one.message() if isinstance(one, _Turn) else one for one in messages]


@dataclass(slots=True)
class _Turn:
    """The items that a model wrote in one turn. Their parts are joined once: there may be tens of thousands."""

    content: str | None = None
    reasoning: list[str] = field(default_factory=list)
    calls: list[MessageToolCall] = field(default_factory=list)

    def add(self, item: MessageItem | ReasoningItem | FunctionCallItem) -> None:
        """Add an item."""
        if isinstance(item, MessageItem):
            self.content = "".join(part.text for part in item.content if not isinstance(part, InputImage))
        elif isinstance(item, ReasoningItem):
            self.reasoning.append("\n".join(part.text for part in item.content or item.summary))
        else:
            function = CalledFunction(name=item.name, arguments=item.arguments)
            self.calls.append(MessageToolCall(id=item.call_id, function=function))

    def message(self) -> ChatMessage:
        """Return the turn as one message."""
        reasoning = "\n".join(filter(None, self.reasoning)) or None
        return ChatMessage(
            role="assistant",
            content=self.content,
            reasoning=reasoning,
            reasoning_content=reasoning,
            tool_calls=self.calls or None,
        )


def image_sources(items: Sequence[Item], num_earlier: int) -> list[ImageSource]:
    """Return the images of messages and of results of calls, in their order."""
    sources = []
    for i, item in enumerate(items):
        name: str
        parts: Sequence[InputText | InputImage | OutputText]
        match item:
            case MessageItem():
                name, parts = "content", item.content
            case FunctionCallOutputItem() if not isinstance(item.output, str):
                name, parts = "output", item.output
            case _:
                continue
        for j, part in enumerate(parts):
            if isinstance(part, InputImage):
                own = f"input[{i - num_earlier}].{name}[{j}].image_url"
                place = own if i >= num_earlier else "previous_response_id"
                sources.append(ImageSource(part.image_url, place, part.detail))
    return sources


def _content(content: str | Sequence[InputText | InputImage | OutputText]) -> str | list[ContentPart]:
    """Return a single part as a string, since not every template reads lists."""
    if isinstance(content, str):
        return content
    if len(content) == 1 and not isinstance(content[0], InputImage):
        return content[0].text
    return [
        ContentPart(type="input_image") if isinstance(part, InputImage) else ContentPart(type="text", text=part.text)
        for part in content
    ]


def _tool_choice(choice: str | dict[str, Any] | None) -> ToolChoice:
    """Return the choice, with the names of the functions that it allows. Raises InvalidRequestError."""
    if not isinstance(choice, dict):
        return ToolChoice.read(choice)
    if choice.get("type") == "function":
        name = choice.get("name")
        return ToolChoice("function", name if isinstance(name, str) else None, choice)
    if choice.get("type") == "allowed_tools" and choice.get("mode") in ("auto", "required"):
        try:
            allowed = msgspec.convert(choice.get("tools"), list[FunctionTool])
        except msgspec.ValidationError:
            allowed = []
        if allowed and all(tool.type == "function" and tool.name is not None for tool in allowed):
            names = frozenset(tool.name or "" for tool in allowed)
            return ToolChoice(choice["mode"], given=choice, allowed=names)
    raise invalid(
        "tool_choice",
        f"must be none, auto, required, a function, or allowed_tools with a mode and functions, got {shorten(choice)}",
    )
