"""From the messages of a request to the prompt's tokens, and to how the reply to it is read."""

from __future__ import annotations

from typing import Any, Final

from jaxserve.apis.openai.conversation import ConversationFields
from jaxserve.errors import UnsupportedParameterError, unsupported
from jaxserve.frontend.messages import ChatMessage, content_text, template_messages
from jaxserve.frontend.parsers.parser_spec import ParserSpec
from jaxserve.frontend.tokenization import Tokenization
from jaxserve.frontend.tools import offered_tools, parameter_schemas, template_tools

THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
"""What templates call the variable that turns thinking on and off."""
_NUM_END_TOKENS: Final = 64
"""Tokens at the end of a prompt that may open or close the reasoning."""


async def encode_conversation(
    tokens: Tokenization, messages: list[ChatMessage], fields: ConversationFields, max_tokens: int
) -> list[int]:
    """The prompt's tokens. Raises InvalidRequestError for what the model's template has no place for."""
    functions = offered_tools(fields.tools, fields.tool_choice)
    if functions:
        _require_tools(tokens)
    return await tokens.encode_chat(
        template_messages(messages),
        add_generation_prompt=not fields.continue_final_message and fields.add_generation_prompt is not False,
        tools=template_tools(functions),
        template_variables=_template_variables(tokens, fields, has_tools=bool(functions)),
        continue_final_message=bool(fields.continue_final_message),
        max_tokens=max_tokens,
    )


def parser_spec(
    tokens: Tokenization,
    prompt: list[int],
    messages: list[ChatMessage],
    fields: ConversationFields,
    *,
    max_calls: int | None = None,
) -> ParserSpec:
    """How the reply to this prompt is read; it ends with `max_calls`."""
    output_format = tokens.output_format
    tools = parameter_schemas(offered_tools(fields.tools, fields.tool_choice))
    end = prompt[-_NUM_END_TOKENS:] if output_format.has_reasoning else []
    return ParserSpec(
        output_format=output_format,
        tools=tools,
        prompt_end=tokens.tokenizer.decode(end, skip_special_tokens=False),
        continued=content_text(messages[-1]) if fields.continue_final_message else None,
        shown_token_ids=tokens.shown_token_ids(with_tools=bool(tools)),
        max_calls=max_calls,
    )


def _require_tools(tokens: Tokenization) -> None:
    if not tokens.output_format.has_tools:
        raise unsupported("tools", "is not supported: it is not known how this model calls tools (--tool-call-parser)")
    if not tokens.tokenizer.takes_tools:
        raise unsupported("tools", "is not supported: the model's chat template has no place for them")


def _template_variables(tokens: Tokenization, fields: ConversationFields, *, has_tools: bool) -> dict[str, Any]:
    """What the template is told; `chat_template_kwargs` says it last."""
    variables: dict[str, Any] = {}

    def is_read(name: str) -> bool:
        return tokens.tokenizer.template_reads(name, has_tools=has_tools)

    if fields.reasoning_effort is not None:
        if is_read("reasoning_effort"):
            variables["reasoning_effort"] = fields.reasoning_effort
        variables |= {name: fields.reasoning_effort != "none" for name in THINKING_SWITCHES if is_read(name)}
        if not variables:
            raise _no_place("reasoning_effort")
    if fields.documents:
        if not is_read("documents"):
            raise _no_place("documents")
        variables["documents"] = fields.documents
    return variables | (fields.chat_template_kwargs or {})


def _no_place(name: str) -> UnsupportedParameterError:
    return unsupported(name, "is not supported: the model's chat template does not read it")
