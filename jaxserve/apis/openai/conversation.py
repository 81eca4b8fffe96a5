"""What a request says of the prompt that its messages become; /v1/chat/completions and /tokenize agree on it."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

from jaxserve.bounds import Bound
from jaxserve.config import LimitsConfig
from jaxserve.errors import InvalidRequestError
from jaxserve.frontend.bounds import check_bound
from jaxserve.frontend.messages import ChatMessage, check_final_message, check_messages
from jaxserve.frontend.tools import ToolChoice, ToolDefinition, check_tools

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ConversationFields(Protocol):
    """Request fields that go to the chat template."""

    tools: list[ToolDefinition] | None
    tool_choice: ToolChoice | None
    reasoning_effort: ReasoningEffort | None
    chat_template_kwargs: dict[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    documents: list[dict[str, Any]] | None


def check_conversation(messages: list[ChatMessage], fields: ConversationFields, limits: LimitsConfig) -> None:
    """Check what needs neither model nor tokenizer."""
    check_messages(messages)
    check_tools(fields.tools, fields.tool_choice, limits)
    variables = msgspec.json.encode(fields.chat_template_kwargs or {}).decode()
    check_bound(Bound("characters", 0, "max_template_kwargs_chars"), "chat_template_kwargs", variables, limits)
    if fields.continue_final_message:
        if fields.add_generation_prompt:
            raise InvalidRequestError(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to true.",
                param="continue_final_message",
            )
        check_final_message(messages)
