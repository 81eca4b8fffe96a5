"""A response is the reply to a chat: from a request and the items before it to the chat request that answers it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from jaxserve.apis.openai.chat_schema import ChatRequest, check_chat
from jaxserve.apis.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
)
from jaxserve.apis.responses.schema import FunctionTool, ResponsesRequest
from jaxserve.apis.schema.common import GenerationFields
from jaxserve.apis.schema.decode import shorten
from jaxserve.apis.schema.renaming import renamed
from jaxserve.config import LimitsConfig
from jaxserve.errors import invalid
from jaxserve.frontend.grammars.constraint import JsonSchemaFormat, ResponseFormat
from jaxserve.frontend.messages import CalledFunction, ChatMessage, ContentPart, MessageToolCall
from jaxserve.frontend.tools import FunctionDefinition, ToolChoice, ToolDefinition

NAMES: Final = (
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"\b(max_completion_tokens|max_tokens)\b"), "max_output_tokens"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"\bmessages\b"), "input"),
    (re.compile(r"(?<=\])\.function\b"), ""),
)
"""What a chat request calls a field, and what a request for a response calls it."""


def chat_request(request: ResponsesRequest, items: Sequence[Item], limits: LimitsConfig) -> ChatRequest:
    """The chat that continues `items`, checked. Raises RequestError in the words of the responses API."""
    choice, allowed = _tool_choice(request.tool_choice)
    messages = chat_messages(items)
    if request.instructions is not None:
        messages.insert(0, ChatMessage(role="system", content=request.instructions))
    chat = ChatRequest(
        **{name: getattr(request, name) for name in GenerationFields.__struct_fields__},
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        logprobs=request.wants_logprobs or None,
        top_logprobs=request.top_logprobs if request.wants_logprobs else None,
        tools=[_tool(tool) for tool in request.tools] if request.tools else None,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
        response_format=_response_format(request),
        chat_template_kwargs=request.chat_template_kwargs,
    )
    with renamed(NAMES):
        check_chat(chat, limits)
    if allowed is not None:
        chat.tools = _allowed_tools(chat.tools or [], allowed)
    return chat


def chat_messages(items: Sequence[Item]) -> list[ChatMessage]:
    """The same conversation as messages: what a model wrote in one turn, its thoughts and calls too, is one of them."""
    messages: list[ChatMessage] = []
    turn: ChatMessage | None = None
    for item in items:
        if isinstance(item, FunctionCallOutputItem):
            messages.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=_content(item.output)))
            turn = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append(ChatMessage(role=item.role, content=_content(item.content)))
            turn = None
        else:
            if turn is None or (turn.content is not None and not isinstance(item, FunctionCallItem)):
                turn = ChatMessage(role="assistant")
                messages.append(turn)
            _add(turn, item)
    return messages


def _add(turn: ChatMessage, item: MessageItem | ReasoningItem | FunctionCallItem) -> None:
    if isinstance(item, MessageItem):
        turn.content = "".join(part.text for part in item.content)
    elif isinstance(item, ReasoningItem):
        text = "\n".join(part.text for part in item.content or item.summary)
        turn.reasoning = turn.reasoning_content = "\n".join(filter(None, (turn.reasoning, text))) or None
    else:
        call = MessageToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
        turn.tool_calls = [*(turn.tool_calls or ()), call]


def _content(content: str | Sequence[InputText | OutputText]) -> str | list[ContentPart]:
    """A single part is a string: not every template knows lists."""
    if isinstance(content, str):
        return content
    if len(content) == 1:
        return content[0].text
    return [ContentPart(type="text", text=part.text) for part in content]


def _tool(tool: FunctionTool) -> ToolDefinition:
    function = FunctionDefinition(
        name=tool.name or "", description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return ToolDefinition(type=tool.type, function=function)


def _tool_choice(choice: str | dict[str, Any] | None) -> tuple[ToolChoice | None, list[str] | None]:
    """The choice as a chat request has it, and the functions that it leaves."""
    if not isinstance(choice, dict):
        return choice, None
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}, None
    if choice.get("type") == "allowed_tools" and choice.get("mode") in ("auto", "required"):
        try:
            allowed = msgspec.convert(choice.get("tools"), list[FunctionTool])
        except msgspec.ValidationError:
            allowed = []
        if allowed and all(tool.type == "function" and tool.name is not None for tool in allowed):
            return choice["mode"], [tool.name or "" for tool in allowed]
    raise invalid(
        "tool_choice",
        f"must be none, auto, required, a function, or allowed_tools with a mode and functions, got {shorten(choice)}",
    )


def _allowed_tools(tools: list[ToolDefinition], names: list[str]) -> list[ToolDefinition]:
    left = [tool for tool in tools if tool.function is not None and tool.function.name in names]
    if len(left) < len(set(names)):
        known = {tool.function.name for tool in left if tool.function is not None}
        raise invalid("tool_choice.tools", f"none of the tools is {shorten(sorted(set(names) - known)[0])}")
    return left


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    wanted = request.text.format if request.text is not None else None
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type)
    schema = JsonSchemaFormat(
        name=wanted.name, description=wanted.description, schema=wanted.schema, strict=wanted.strict
    )
    return ResponseFormat(type="json_schema", json_schema=schema)
