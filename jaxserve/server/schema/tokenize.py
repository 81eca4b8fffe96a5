"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.server.schema.conversation import ReasoningEffort, check_conversation
from jaxserve.server.schema.messages import ChatMessage
from jaxserve.server.schema.tools import ToolChoice, ToolDefinition


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    """Of a `prompt`; the chat template brings its own."""
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class DetokenizeReply(msgspec.Struct):
    prompt: str


def check_tokenize(request: TokenizeRequest) -> None:
    """Exactly one of the two kinds of input."""
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("Exactly one of 'prompt' and 'messages' must be given.", param="prompt")
    if request.messages is not None:
        check_conversation(request.messages, request)
