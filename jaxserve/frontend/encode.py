"""From the texts of a request to tokens, and to the parser of its replies.

A text that cannot fit the context is rejected by its length, before a tokenizer sees it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import msgspec

from jaxserve.errors import ContextLengthError, InvalidRequestError, UnsupportedParameterError, invalid, unsupported
from jaxserve.frontend.checks import refuse, shorten
from jaxserve.frontend.images.loader import NO_IMAGES, LoadedImages
from jaxserve.frontend.messages import ChatMessage, FunctionDefinition, MessageToolCall
from jaxserve.frontend.parsers.explained_tools import with_explained_tools
from jaxserve.frontend.parsers.output_format import ParserSpec
from jaxserve.frontend.prompt_embeds.prompt import EmbedsSource, LoadedEmbeds
from jaxserve.frontend.request import Conversation, GenerationRequest
from jaxserve.frontend.tokenization import Tokenization
from jaxserve.ipc.messages import ModelInfo
from jaxserve.tokenizer.tokenizer import TooManyTokensError

THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
"""Template variables that turn reasoning on and off."""
MAX_LISTED_TOKENS: Final = 1 << 20
"""Number of tokens of a text that is encoded for no context. Lists of ids are made and freed under the interpreter's lock."""
NO_EMBEDS: Final[Mapping[int, LoadedEmbeds]] = MappingProxyType({})
_NO_TOKEN: Final = 0
"""Stands in a prompt for a token that was given as an embedding."""
_NUM_END_TOKENS: Final = 64
"""Number of tokens at the end of a prompt in which reasoning may open or close."""


@dataclass(frozen=True, slots=True)
class RequestNotes:
    """Properties of a request that headers of its reply report."""

    ignored: tuple[str, ...] = ()
    """Known fields that have no effect with this model."""
    tool_format: str | None = None
    """The format of calls if messages explain it, instead of the chat template."""


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """The texts of a request as tokens."""

    prompts: Sequence[list[int]]
    max_tokens: Sequence[int]
    """Number of tokens that may be generated after each prompt."""
    words: Mapping[str, Sequence[tuple[int, ...]]]
    """Token ids of sampling options that hold words."""
    prediction: list[int]
    spec: ParserSpec
    notes: RequestNotes


@dataclass(frozen=True, slots=True)
class Context:
    """The tokens that a prompt and its output may have together."""

    limit: int
    has_output: bool = True
    """False: nothing is generated, and the prompt may fill the context."""

    @property
    def longest_prompt(self) -> int:
        """Number of tokens of the longest prompt."""
        return self.limit - self.has_output


async def encode_request(
    tokens: Tokenization,
    request: GenerationRequest,
    model_info: ModelInfo,
    images: LoadedImages = NO_IMAGES,
    embeds: Mapping[int, LoadedEmbeds] = NO_EMBEDS,
) -> EncodedRequest:
    """Encode all texts of a request; embeds: embeddings by the index of their prompt. Raises InvalidRequestError, and ContextLengthError for what does not fit."""
    context = Context(model_info.max_model_len, has_output=request.max_tokens != 0)
    limit, name = context.limit, request.prompt_name
    spec, notes, prompts = ParserSpec(), RequestNotes(), []
    if isinstance(request.prompt, Conversation):
        prompts.append(await encode_conversation(tokens, request.prompt, context, images))
        spec, notes = _parser_spec(tokens, request, request.prompt, prompts[0]), _notes(tokens, request.prompt)
    else:
        for index, text in enumerate(request.prompt.prompts):
            if isinstance(text, EmbedsSource):
                prompts.append([_NO_TOKEN] * embeds[index].num_tokens)
            elif isinstance(text, str):
                special = request.prompt.add_special_tokens
                prompts.append(await encode_text(tokens, text, context, add_special_tokens=special))
            else:
                if len(text) > context.longest_prompt:  # before the ids are looked at: there may be millions
                    raise _too_long(context, str(len(text)), name)
                await tokens.check_token_ids(name, [text], model_info.vocab_size)
                prompts.append(text)
    return EncodedRequest(
        prompts,
        [_max_tokens(request, len(prompt), context) for prompt in prompts],
        await tokens.encode_words(request.sampling),
        await tokens.encode_start(request.prediction, limit) if request.prediction else [],
        spec,
        notes,
    )


async def encode_conversation(
    tokens: Tokenization,
    conversation: Conversation,
    context: Context | None = None,
    images: LoadedImages = NO_IMAGES,
) -> list[int]:
    """Return the token ids of a conversation; the template brings the special tokens.

    Raises ContextLengthError, InvalidRequestError for more than MAX_LISTED_TOKENS without a context, and UnsupportedParameterError for what the model's template does not read.
    """
    tokenizer, param = tokens.tokenizer, conversation.names.prompt
    functions = [function for _, function in conversation.offered]
    variables = _template_variables(tokens, conversation, has_tools=bool(functions))
    is_explained = tokens.output_format.explains_tools

    def encode() -> list[int]:
        _check_chars(tokens, sum(map(_num_chars, conversation.messages)), context, param)
        messages = template_messages(conversation.messages, tokens.output_format.prompt_call_id)
        tools = _template_tools(functions)
        if is_explained:
            messages = with_explained_tools(messages, tools, takes_system=tokenizer.chat_templates.take_system)
        return tokenizer.encode_chat(
            messages,
            add_generation_prompt=has_prefix,
            tools=[] if is_explained else tools,
            template_variables=variables,
            continue_final_message=conversation.continue_final_message,
            placeholders=images.placeholders,
            images=images.texts,
            max_tokens=_most(context),
        )

    has_prefix = not conversation.continue_final_message and conversation.add_generation_prompt is not False
    try:
        return await tokens.call(encode)
    except TooManyTokensError as error:
        raise _too_many(error, context, param) from None


async def encode_text(
    tokens: Tokenization, text: str, context: Context | None = None, *, add_special_tokens: bool
) -> list[int]:
    """Return the token ids of a plain prompt. Raises as `encode_conversation` does."""
    _check_chars(tokens, len(text), context, "prompt")
    try:
        return await tokens.call(lambda: tokens.tokenizer.encode(text, add_special_tokens, _most(context)))
    except TooManyTokensError as error:
        raise _too_many(error, context, "prompt") from None


def template_messages(messages: Sequence[ChatMessage], prompt_id: str | None = None) -> list[dict[str, Any]]:
    """Return the conversation as a chat template reads it: fields that were not given are absent.

    Arguments of calls are objects. A result gets the name of the function that was called, which some templates read
    and OpenAI's messages do not carry. prompt_id: see `ToolFormat`.
    """
    called: dict[str, str] = {}
    ids: dict[str, str] = {}
    num_calls = 0
    rendered = []
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": message.content if message.content else ""}
        if isinstance(message.content, list):
            fields["content"] = [
                {"type": "video" if part.is_video else "image"}
                if part.is_image
                else {"type": "text", "text": part.text}
                for part in message.content
            ]
        if message.tool_calls:
            fields["tool_calls"] = [_template_call(call) for call in message.tool_calls]
            called |= {call.id: call.function.name for call in message.tool_calls if call.id is not None}
            for call, shown in zip(message.tool_calls, fields["tool_calls"], strict=True):
                if prompt_id is not None:
                    shown["id"] = prompt_id.format(name=call.function.name, index=num_calls)
                    ids |= {} if call.id is None else {call.id: shown["id"]}
                num_calls += 1
        extras = {
            "name": message.name,
            "tool_call_id": ids.get(message.tool_call_id or "", message.tool_call_id),
            "reasoning": message.reasoning,
            "reasoning_content": message.reasoning_content,
        }
        if message.role == "tool" and message.name is None and message.tool_call_id is not None:
            extras["name"] = called.get(message.tool_call_id)
        fields |= {name: value for name, value in extras.items() if value is not None}
        rendered.append(fields)
    return rendered


def _parser_spec(
    tokens: Tokenization, request: GenerationRequest, conversation: Conversation, prompt: list[int]
) -> ParserSpec:
    output_format = tokens.output_format
    tools = {function.name: function.parameters or {} for _, function in conversation.offered}
    end = prompt[-_NUM_END_TOKENS:] if output_format.has_reasoning else []
    return ParserSpec(
        output_format=output_format,
        tools=tools,
        prompt_end=tokens.tokenizer.decode(end, skip_special_tokens=False),
        continued=_content_text(conversation.messages[-1]) if conversation.continue_final_message else None,
        shown_token_ids=tokens.shown_token_ids(with_tools=bool(tools)),
        max_calls=1 if conversation.is_parallel is False else None,
        is_json=request.constraint is not None and not conversation.tool_choice.is_forced,
    )


def _template_variables(tokens: Tokenization, conversation: Conversation, *, has_tools: bool) -> dict[str, Any]:
    """Return the template's variables. Raises UnsupportedParameterError for what the template does not read."""
    tokenizer, output_format, names = tokens.tokenizer, tokens.output_format, conversation.names
    if has_tools and not output_format.has_tools:
        raise unsupported("tools", "is not supported: this server was started with --tool-call-parser none")
    if has_tools and not (tokenizer.chat_templates.take_tools or output_format.explains_tools):
        raise unsupported("tools", "is not supported: the model's chat template has no place for them")

    def is_read(name: str) -> bool:
        return tokenizer.chat_templates.read(name, has_tools=has_tools)

    variables: dict[str, Any] = {}
    effort, thinking = conversation.reasoning_effort, conversation.thinking
    switches = _switches(tokens, conversation)
    if effort is not None:
        if is_read("reasoning_effort"):
            variables["reasoning_effort"] = effort
        variables |= dict.fromkeys(switches, effort != "none")
        if not variables and effort == "none" and output_format.has_reasoning:
            raise _unread(names.reasoning_effort)
    if conversation.documents:
        if not is_read("documents"):
            raise _unread("documents")
        variables["documents"] = conversation.documents
    if thinking is not None:
        if not switches and output_format.has_reasoning and not thinking:
            raise refuse(names.thinking, "disabled")
        variables |= dict.fromkeys(switches, thinking)
    return variables | dict(conversation.template_variables)


def _switches(tokens: Tokenization, conversation: Conversation) -> list[str]:
    """Return the template's switches of reasoning if the request says anything of it."""
    if conversation.reasoning_effort is None and conversation.thinking is None:
        return []
    templates, has_tools = tokens.tokenizer.chat_templates, bool(conversation.offered)
    return [name for name in THINKING_SWITCHES if templates.read(name, has_tools=has_tools)]


def _notes(tokens: Tokenization, conversation: Conversation) -> RequestNotes:
    output_format, names = tokens.output_format, conversation.names
    has_tools, effort = bool(conversation.offered), conversation.reasoning_effort
    is_read = bool(_switches(tokens, conversation))
    is_effort_read = is_read or tokens.tokenizer.chat_templates.read("reasoning_effort", has_tools=has_tools)
    unused = {
        names.reasoning_effort: effort not in (None, "none") and not is_effort_read,
        names.thinking: bool(conversation.thinking) and not is_read and not output_format.has_reasoning,
        names.thinking_budget: conversation.thinking_budget is not None and not output_format.has_reasoning,
    }
    explained = output_format.tools if output_format.explains_tools and has_tools else None
    return RequestNotes(
        tuple(name for name, is_unused in unused.items() if is_unused), None if explained is None else explained.name
    )


def _unread(name: str) -> UnsupportedParameterError:
    return unsupported(name, "is not supported: the model's chat template does not read it")


def _num_chars(message: ChatMessage) -> int:
    content = message.content or ""
    return len(content) if isinstance(content, str) else sum(len(part.text or "") for part in content)


def _check_chars(tokens: Tokenization, num_chars: int, context: Context | None, param: str) -> None:
    at_least = -(-num_chars // tokens.tokenizer.longest_token_chars)
    if context is not None and at_least > context.longest_prompt:
        raise _too_long(context, f"at least {at_least}", param)


def _most(context: Context | None) -> int:
    """Return the largest number of tokens of a prompt."""
    return MAX_LISTED_TOKENS if context is None else context.longest_prompt


def _too_many(error: TooManyTokensError, context: Context | None, param: str) -> InvalidRequestError:
    num_tokens = f"{'' if error.is_exact else 'more than '}{error.num_tokens}"
    if context is None:
        return invalid(param, f"at most {MAX_LISTED_TOKENS} tokens are listed, got {num_tokens}")
    return _too_long(context, num_tokens, param)


def _max_tokens(request: GenerationRequest, num_prompt: int, context: Context) -> int:
    """Return the number of tokens that may be generated. Raises ContextLengthError if they do not fit the context."""
    limit, param = context.limit, request.prompt_name
    asked, left = request.max_tokens, limit - num_prompt
    if num_prompt == 0:
        raise invalid(param, "it has no tokens")
    if num_prompt > context.longest_prompt:
        raise _too_long(context, str(num_prompt), param)
    if asked is None or asked <= left:
        return left if asked is None else asked
    if request.is_limit_clipped:
        return left
    raise ContextLengthError(
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{shorten(num_prompt + asked)} tokens ({num_prompt} in the {param}, {shorten(asked)} in the completion). "
        f"Please reduce the length of the {param} or completion.",
        param=param,
    )


def _too_long(context: Context, num_prompt_tokens: str, param: str) -> ContextLengthError:
    """Return the error for a prompt that is too long by itself. `num_prompt_tokens` may be "at least N"."""
    effect = "leaves no room for output" if context.has_output else "is more"
    return ContextLengthError(
        f"This model's maximum context length is {context.limit} tokens. However, your prompt contains "
        f"{num_prompt_tokens} input tokens, which {effect}. Please reduce the length of the input prompt.",
        param=param,
    )


def _content_text(message: ChatMessage) -> str:
    """Return the text of a message."""
    if isinstance(message.content, list):
        return "\n".join(part.text or "" for part in message.content)
    return message.content or ""


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


def _template_tools(functions: Sequence[FunctionDefinition]) -> list[dict[str, Any]]:
    """Return the tools as chat templates read them: with all keys, since templates do not check for absent ones."""
    return [
        {
            "type": "function",
            "function": {
                "name": function.name,
                "description": function.description or "",
                "parameters": function.parameters or {"type": "object", "properties": {}},
            },
        }
        for function in functions
    ]
