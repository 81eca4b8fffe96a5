"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from jaxserve.apis.openai.conversation import ReasoningEffort, check_conversation
from jaxserve.bounds import Bound
from jaxserve.config import LimitsConfig
from jaxserve.errors import InvalidRequestError
from jaxserve.frontend.bounds import check_bounds
from jaxserve.frontend.messages import ChatMessage
from jaxserve.frontend.tools import ToolChoice, ToolDefinition


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    """One of the names of /v1/models; the first of them if it is not given."""
    prompt: str | None = None
    """A text."""
    messages: Annotated[list[ChatMessage] | None, Bound("items", 1, "max_messages")] = None
    """A conversation, which the chat template makes a text of."""
    add_special_tokens: bool | None = None
    """Of a `prompt`; the chat template brings its own."""
    tools: Annotated[list[ToolDefinition] | None, Bound("items", 0, "max_tools")] = None
    """Functions that the chat template tells the model of."""
    tool_choice: ToolChoice | None = None
    """`none` leaves the tools out."""
    reasoning_effort: ReasoningEffort | None = None
    """Handed to the chat template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    add_generation_prompt: bool | None = None
    """Whether the text ends with the begin of an assistant's message."""
    continue_final_message: bool | None = None
    """Whether the text ends within the last message, which is the assistant's."""
    documents: list[dict[str, Any]] | None = None
    """Handed to the chat template."""
    return_token_strs: bool | None = None
    """Whether the reply has each token's text."""


class TokenizeReply(msgspec.Struct):
    count: int
    """How many tokens."""
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    """Token ids."""
    model: str | None = None
    """One of the names of /v1/models; the first of them if it is not given."""


class DetokenizeReply(msgspec.Struct):
    prompt: str
    """The text, special tokens included."""


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """Names and values as in a Hugging Face `tokenizer_config.json`; null where the model has no such token."""

    bos_token: str | None
    """Begins a text."""
    eos_token: str | None
    """Ends a reply."""
    pad_token: str | None
    """Fills up batches; of no use here."""
    unk_token: str | None
    """Stands for what has no token."""
    chat_template: str | None
    """That of chats without tools."""
    model_max_length: int
    """Tokens of prompt and reply together."""


def check_tokenize(request: TokenizeRequest, limits: LimitsConfig) -> None:
    """Exactly one of the two kinds of input."""
    check_bounds(request, limits)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("Exactly one of 'prompt' and 'messages' must be given.", param="prompt")
    if request.messages is not None:
        check_conversation(request.messages, request, limits)
