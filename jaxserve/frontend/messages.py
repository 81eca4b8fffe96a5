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


def check_parts(place: str, parts: list[ContentPart], *types: str) -> None:
    """Raise InvalidRequestError for parts without a text and for other types. Default of `types`: those of messages."""
    for i, part in enumerate(parts):
        if part.type not in (types or _TEXT_PARTS):
            raise refuse(f"{place}[{i}].type={part.type[:MAX_ECHOED_CHARS]}")
        if part.text is None:
            raise missing(f"{place}[{i}].text")
