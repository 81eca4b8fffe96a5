"""What a request says of the prompt that its messages become; /v1/chat/completions and /tokenize agree on it."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.server.schema import limits
from jaxserve.server.schema.messages import ChatMessage, check_final_message, check_messages
from jaxserve.server.schema.tools import ToolChoice, ToolDefinition, check_tools

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ConversationFields(Protocol):
    """Request fields that go to the chat template."""

    @property
    def tools(self) -> list[ToolDefinition] | None: ...

    @property
    def tool_choice(self) -> ToolChoice | None: ...

    @property
    def reasoning_effort(self) -> ReasoningEffort | None: ...

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...

    @property
    def add_generation_prompt(self) -> bool | None: ...

    @property
    def continue_final_message(self) -> bool | None: ...

    @property
    def documents(self) -> list[dict[str, Any]] | None: ...


def check_conversation(messages: list[ChatMessage], fields: ConversationFields) -> None:
    """Check what needs neither model nor tokenizer."""
    check_messages(messages)
    check_tools(fields.tools, fields.tool_choice)
    num_chars = len(msgspec.json.encode(fields.chat_template_kwargs or {}))
    if num_chars > limits.MAX_TEMPLATE_KWARGS_CHARS:
        raise InvalidRequestError(
            f"Invalid value for 'chat_template_kwargs': at most {limits.MAX_TEMPLATE_KWARGS_CHARS} characters "
            f"of JSON, got {num_chars}.",
            param="chat_template_kwargs",
        )
    if fields.continue_final_message:
        if fields.add_generation_prompt:
            raise InvalidRequestError(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to true.",
                param="continue_final_message",
            )
        check_final_message(messages)
