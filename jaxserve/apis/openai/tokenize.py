"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`, for clients that write prompts themselves, such as lm-eval."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxserve.apis.routes import Call, Route
from jaxserve.apis.schema.common import ModelName, ModelQuery
from jaxserve.bounds import Bound
from jaxserve.config import LimitsConfig
from jaxserve.errors import InvalidRequestError
from jaxserve.frontend.encode import encode_conversation, encode_text
from jaxserve.frontend.messages import ChatMessage, ToolChoice, ToolDefinition, read_images, read_tools
from jaxserve.frontend.request import MESSAGES, Conversation, ReasoningEffort


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    model: ModelName = None
    prompt: Annotated[str | None, Meta(description="Text to tokenize, of at most 1048576 tokens.")] = None
    messages: Annotated[
        list[ChatMessage] | None, MESSAGES, Meta(description="Conversation to render with the chat template.")
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        Meta(description="False: a `prompt` does not get special tokens; the chat template always adds its own."),
    ] = None
    tools: Annotated[
        list[ToolDefinition] | None,
        Bound("items", 0, "max_tools"),
        Meta(description="Functions for the chat template."),
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, Meta(description="`none` omits the tools, `allowed_tools` all but some.")
    ] = None
    reasoning_effort: Annotated[ReasoningEffort | None, Meta(description="Variable of the chat template.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Further variables of the chat template.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, Meta(description="True: the text opens an assistant message at its end.")
    ] = None
    continue_final_message: Annotated[
        bool | None, Meta(description="True: the text ends inside the last message, which must be the assistant's.")
    ] = None
    documents: Annotated[list[dict[str, Any]] | None, Meta(description="Documents for the chat template.")] = None
    return_token_strs: Annotated[bool | None, Meta(description="True: return each token's text.")] = None


class TokenizeReply(msgspec.Struct):
    count: Annotated[int, Meta(description="Number of tokens.")]
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: Annotated[list[int], Meta(description="Token ids.")]
    model: ModelName = None


class DetokenizeReply(msgspec.Struct):
    prompt: Annotated[str, Meta(description="Text with special tokens.")]


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """Names and values as in a Hugging Face `tokenizer_config.json`; null where the model has no such token."""

    bos_token: Annotated[str | None, Meta(description="Token at the beginning of a text.")]
    eos_token: Annotated[str | None, Meta(description="Token that ends a reply.")]
    pad_token: Annotated[str | None, Meta(description="Padding token; not used by the server.")]
    unk_token: Annotated[str | None, Meta(description="Token for unknown text.")]
    chat_template: Annotated[str | None, Meta(description="Chat template for chats without tools.")]
    model_max_length: Annotated[int, Meta(description="Maximum number of tokens of prompt and reply together.")]


@partial(Route, "POST", "/tokenize", tag="Tokens", reply=TokenizeReply)
async def tokenize(call: Call, body: TokenizeRequest) -> TokenizeReply:
    """Return the token ids of a text or of a conversation."""
    frontend = call.frontend
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Exactly one of 'prompt' and 'messages' must be given.", param="prompt")
    messages = body.messages
    conversation = None if messages is None else await call.off_loop(_conversation, body, messages, frontend.limits)
    frontend.require_model(body.model)
    max_model_len = frontend.client.require_ready().max_model_len
    if conversation is not None:
        images = await frontend.images.load(conversation.images, frontend.client.require_ready().images)
        token_ids = await encode_conversation(frontend.tokenization, conversation, images=images)
    else:
        token_ids = await encode_text(
            frontend.tokenization, body.prompt or "", add_special_tokens=body.add_special_tokens is not False
        )
    strings = await frontend.tokenization.texts_of(token_ids) if body.return_token_strs else None
    return TokenizeReply(count=len(token_ids), max_model_len=max_model_len, tokens=token_ids, token_strs=strings)


def _conversation(body: TokenizeRequest, messages: list[ChatMessage], limits: LimitsConfig) -> Conversation:
    """Return the conversation, checked. Raises InvalidRequestError."""
    conversation = Conversation(
        messages=messages,
        functions=read_tools(body.tools),
        tool_choice=ToolChoice.read(body.tool_choice),
        reasoning_effort=body.reasoning_effort,
        documents=body.documents,
        template_variables=body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        images=read_images(messages),
    )
    conversation.check(limits)
    return conversation


@partial(Route, "POST", "/detokenize", tag="Tokens", reply=DetokenizeReply)
async def detokenize(call: Call, body: DetokenizeRequest) -> DetokenizeReply:
    """Return the text of token ids."""
    frontend = call.frontend
    frontend.require_model(body.model)
    vocab_size = frontend.client.require_ready().vocab_size
    await frontend.tokenization.check_token_ids("tokens", [body.tokens], vocab_size)
    return DetokenizeReply(await frontend.tokenization.decode(body.tokens, skip_special_tokens=False))


@partial(Route, "GET", "/tokenizer_info", tag="Tokens", reply=TokenizerInfo)
async def tokenizer_info(call: Call, query: ModelQuery) -> TokenizerInfo:
    """Return special tokens, chat template and length limit."""
    call.frontend.require_model(query.model)
    model_info, tokenizer = call.frontend.client.require_ready(), call.frontend.tokenization.tokenizer
    named = tokenizer.chat_templates.named_tokens
    return TokenizerInfo(
        bos_token=named.get("bos_token"),
        eos_token=named.get("eos_token"),
        pad_token=named.get("pad_token"),
        unk_token=named.get("unk_token"),
        chat_template=tokenizer.chat_templates.default_source,
        model_max_length=model_info.max_model_len,
    )
