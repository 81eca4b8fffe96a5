"""Messages in the form that OpenAI's API and chat templates share: their checks, and how a template reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from jaxserve.errors import invalid
from jaxserve.frontend.checks import MAX_ECHOED_CHARS, missing, refuse

_TEXT_PARTS: Final = ("text", "input_text", "output_text")


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: Annotated[
        str | dict[str, Any], Meta(description="JSON as in the reply; a decoded object is accepted as well.")
    ] = "{}"


class MessageToolCall(msgspec.Struct, kw_only=True):
    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    function_call: Any = None
    audio: Any = None
    reasoning: str | None = None
    reasoning_content: str | None = None


def check_messages(messages: Sequence[ChatMessage], *, is_last_continued: bool = False) -> None:
    """Raise InvalidRequestError for messages and parts that cannot be rendered, naming their place.

    is_last_continued: the reply continues the last message.
    """
    for i, message in enumerate(messages):
        for name in ("function_call", "audio"):
            if getattr(message, name):
                raise refuse(f"messages[{i}].{name}")
        if message.tool_calls and message.role != "assistant":
            raise invalid(f"messages[{i}].tool_calls", f"only an assistant calls tools, not a {message.role}")
        if message.content is None and message.role != "assistant":
            raise invalid(f"messages[{i}].content", f"a {message.role} message needs a string or text parts")
        if isinstance(message.content, list):
            check_parts(f"messages[{i}].content", message.content)
    last = messages[-1]
    if is_last_continued and (last.role != "assistant" or not last.content or last.tool_calls):
        raise invalid(
            "continue_final_message", "the last message must be an assistant's, with content and without tool calls"
        )


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return the conversation as a chat template reads it: fields that were not given are absent.

    Arguments of calls are objects. A result gets the name of the function that was called, which some templates read
    and OpenAI's messages do not carry.
    """
    called: dict[str, str] = {}
    rendered = []
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": message.content if message.content else ""}
        if isinstance(message.content, list):
            fields["content"] = [{"type": "text", "text": part.text} for part in message.content]
        if message.tool_calls:
            fields["tool_calls"] = [_template_call(call) for call in message.tool_calls]
            called |= {call.id: call.function.name for call in message.tool_calls if call.id is not None}
        extras = {
            "name": message.name,
            "tool_call_id": message.tool_call_id,
            "reasoning": message.reasoning,
            "reasoning_content": message.reasoning_content,
        }
        if message.role == "tool" and message.name is None and message.tool_call_id is not None:
            extras["name"] = called.get(message.tool_call_id)
        fields |= {name: value for name, value in extras.items() if value is not None}
        rendered.append(fields)
    return rendered


def content_text(message: ChatMessage) -> str:
    """Return the text of a message."""
    if isinstance(message.content, list):
        return "\n".join(part.text or "" for part in message.content)
    return message.content or ""


def check_parts(place: str, parts: list[ContentPart], *types: str) -> None:
    """Raise InvalidRequestError for parts without a text and for other types. Default of `types`: those of messages."""
    for i, part in enumerate(parts):
        if part.type not in (types or _TEXT_PARTS):
            raise refuse(f"{place}[{i}].type={part.type[:MAX_ECHOED_CHARS]}")
        if part.text is None:
            raise missing(f"{place}[{i}].text")


def _template_call(call: MessageToolCall) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "type": call.type,
        "function": {"name": call.function.name, "arguments": _decoded(call.function.arguments)},
    }
    return fields if call.id is None else {"id": call.id, **fields}


def _decoded(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    """Return the arguments as an object, or the text itself if a model wrote something else."""
    if isinstance(arguments, dict):
        return arguments
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return arguments
