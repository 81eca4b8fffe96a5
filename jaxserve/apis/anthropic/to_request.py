"""From Anthropic's requests to chat requests, which everything behind the endpoint understands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final

from jaxserve.apis.anthropic.schema import (
    Conversation,
    InputBlock,
    MessagesRequest,
    TextInput,
    ThinkingConfig,
    ThinkingInput,
    ToolInput,
    ToolResultInput,
    ToolUseInput,
)
from jaxserve.apis.openai.chat_schema import ChatRequest
from jaxserve.apis.openai.conversation import ReasoningEffort
from jaxserve.apis.schema.common import GenerationFields
from jaxserve.apis.schema.unsupported import refuse
from jaxserve.errors import invalid
from jaxserve.frontend.grammars.constraint import JsonSchemaFormat, ResponseFormat
from jaxserve.frontend.messages import CalledFunction, ChatMessage, ContentPart, MessageToolCall
from jaxserve.frontend.request import THINKING_SWITCHES
from jaxserve.frontend.tokenization import Tokenization
from jaxserve.frontend.tools import FunctionDefinition, ToolChoice, ToolDefinition

NAMES: Final = (
    (re.compile(r"\bthinking_token_budget\b"), "thinking.budget_tokens"),
    (re.compile(r"\breasoning_effort\b"), "output_config.effort"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "output_config.format"),
    (re.compile(r"(?<=\])\.function\.parameters\b"), ".input_schema"),
    (re.compile(r"(?<=\])\.function\b"), ""),
)
"""What a chat request calls a field, and what Anthropic's calls it."""


def chat_request(request: MessagesRequest, tokens: Tokenization) -> ChatRequest:
    """The same as a chat request, without its limit of tokens. Raises InvalidRequestError."""
    output_format = request.output_config.format if request.output_config is not None else None
    schema = JsonSchemaFormat(schema=output_format.schema) if output_format is not None else None
    return ChatRequest(
        **_conversation(request, tokens),
        **{name: getattr(request, name) for name in GenerationFields.__struct_fields__ if name != "stop"},
        stop=[
            *(request.stop_sequences or ()),
            *([request.stop] if isinstance(request.stop, str) else request.stop or ()),
        ],
        response_format=ResponseFormat(type="json_schema", json_schema=schema) if schema is not None else None,
    )


def counted_request(request: Conversation, tokens: Tokenization) -> ChatRequest:
    """The conversation alone as a chat request. Raises InvalidRequestError."""
    return ChatRequest(**_conversation(request, tokens), model=request.model)


def _conversation(request: Conversation, tokens: Tokenization) -> dict[str, Any]:
    messages = chat_messages(request)
    choice = request.tool_choice
    has_tools = bool(request.tools) and not (choice is not None and choice.type == "none")
    variables = _thinking_variables(request.thinking, tokens, has_tools=has_tools)
    return {
        "messages": messages,
        "continue_final_message": messages[-1].role == "assistant" if messages else None,
        "tools": [_tool(tool) for tool in request.tools] if request.tools is not None else None,
        "tool_choice": _tool_choice(request),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "reasoning_effort": _effort(request),
        "thinking_token_budget": request.thinking.budget_tokens if request.thinking is not None else None,
        "chat_template_kwargs": variables | (request.chat_template_kwargs or {}),
    }


def chat_messages(request: Conversation) -> list[ChatMessage]:
    """The turns as OpenAI's messages: results of calls are messages of their own."""
    messages = [ChatMessage(role="system", content=_content(_texts(request.system)))] if request.system else []
    for role, turns in groupby(request.messages, key=lambda message: message.role):
        blocks: list[InputBlock] = []
        for turn in turns:
            blocks += _texts(turn.content) if isinstance(turn.content, str) else turn.content
        if role == "assistant":
            messages.append(_assistant(blocks))
        else:
            messages += _told(role, blocks)
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant" and (not last.content or last.tool_calls):
        raise invalid(
            "messages",
            "the last one must be a user's, or an assistant's with text and without "
            "tool_use, which the reply continues",
        )
    return messages


def _texts(content: str | list[TextInput] | None) -> list[TextInput]:
    return [TextInput(text=content)] if isinstance(content, str) else content or []


def _content(texts: Sequence[TextInput]) -> str | list[ContentPart]:
    if len(texts) < 2:
        return "".join(text.text for text in texts)
    return [ContentPart(type="text", text=text.text) for text in texts]


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


def _told(role: Any, blocks: Sequence[InputBlock]) -> Iterator[ChatMessage]:
    """Messages of a user or of the system, in the order of their blocks."""
    if not blocks:
        yield ChatMessage(role=role, content="")
    for _, run in groupby(blocks, key=type):
        alike = list(run)
        texts = [block for block in alike if isinstance(block, TextInput)]
        if texts:
            yield ChatMessage(role=role, content=_content(texts))
        for block in alike:
            if isinstance(block, ToolResultInput):
                error = [TextInput(text="Error:")] if block.is_error else []
                content = _content([*error, *_texts(block.content)])
                yield ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=content)


def _tool(tool: ToolInput) -> ToolDefinition:
    function = FunctionDefinition(
        name=tool.name or "", description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return ToolDefinition(type="function", function=function)


def _tool_choice(request: Conversation) -> ToolChoice | None:
    if request.tool_choice is None:
        return None
    if request.tool_choice.type == "tool":
        return {"type": "function", "function": {"name": request.tool_choice.name}}
    return {"any": "required"}.get(request.tool_choice.type, request.tool_choice.type)


def _effort(request: Conversation) -> ReasoningEffort | None:
    effort = request.output_config.effort if request.output_config is not None else None
    return "xhigh" if effort == "max" else effort


def _thinking_variables(thinking: ThinkingConfig | None, tokens: Tokenization, *, has_tools: bool) -> dict[str, bool]:
    """The template's switches. Refuses what neither they nor the model's nature bring about."""
    if thinking is None or thinking.type == "adaptive":
        return {}
    is_enabled = thinking.type == "enabled"
    switches = [name for name in THINKING_SWITCHES if tokens.tokenizer.template_reads(name, has_tools=has_tools)]
    if not switches and tokens.output_format.has_reasoning != is_enabled:
        raise refuse(f"thinking.type={thinking.type}")
    return dict.fromkeys(switches, is_enabled)
