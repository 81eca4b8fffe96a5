"""A grammar for replies with tool calls: the call syntax of the model around arguments constrained to their schemas."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from jaxserve.errors import unsupported
from jaxserve.frontend.grammars.constraint import NamedGrammar, schema_grammar
from jaxserve.frontend.parsers.tool_format import CallSyntax
from jaxserve.frontend.tokenization import Tokenization
from jaxserve.frontend.tools import FunctionDefinition, ToolChoice, ToolDefinition, named_function, offered_tools
from jaxserve.ipc.messages import CallGrammar, CallTemplate, Grammar

_NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS: Final[dict[str, Any]] = {"type": "object"}


def call_grammar(
    tokens: Tokenization,
    tools: list[ToolDefinition] | None,
    choice: ToolChoice | None,
    *,
    is_parallel: bool,
    max_depth: int,
) -> NamedGrammar | None:
    """Return the grammar that `tool_choice` and `strict` functions require; None if they do not constrain the reply.

    A choice that forces a call constrains the arguments of every function to its schema; other choices constrain those
    of strict functions. Raises UnsupportedParameterError if no grammar can express the model's calls.
    """
    functions = offered_tools(tools, choice)
    named = named_function(choice)
    is_forced = choice == "required" or named is not None
    strict = [i for i, function in enumerate(functions) if function.strict]
    if not is_forced and not strict:
        return None
    syntax = _syntax(tokens)
    if syntax is None:
        raise unsupported(
            "tool_choice" if is_forced else f"tools[{strict[0]}].function.strict",
            "is not supported: nothing can hold calls to a form in the format in which this model writes them "
            "(--tool-call-parser)",
        )
    spelled = tokens.tokenizer.with_control_tokens
    templates = []
    for i, function in enumerate(functions):
        if named in (None, function.name):
            is_held = is_forced or function.strict
            schema = _arguments(function, f"tools[{i}].function.parameters", max_depth) if is_held else _ANY_ARGUMENTS
            name = msgspec.json.encode(function.name).decode() if syntax.is_name_quoted else function.name
            before = spelled(syntax.before + name + syntax.between)
            templates.append(CallTemplate(before, schema, spelled(syntax.after)))
    separator = syntax.separator if is_parallel and named is None else None
    calls = CallGrammar(
        spelled(syntax.begin),
        templates,
        None if separator is None else spelled(separator),
        spelled(syntax.end),
        allows_text=not is_forced,
        reasoning=tokens.output_format.reasoning.opener if tokens.output_format.reasoning is not None else "",
    )
    return NamedGrammar(Grammar("calls", msgspec.json.encode(calls).decode()), "tools")


def _syntax(tokens: Tokenization) -> CallSyntax | None:
    """Return the first call syntax whose control tokens the vocabulary has."""
    syntaxes = tokens.output_format.tools.syntaxes if tokens.output_format.tools is not None else ()
    return next((one for one in syntaxes if tokens.tokenizer.has_control_tokens(one.control_tokens)), None)


def _arguments(function: FunctionDefinition, param: str, max_depth: int) -> dict[str, Any]:
    """Return the schema of the arguments, which are always an object."""
    if function.parameters is None:
        return _NO_PARAMETERS
    schema_grammar(function.parameters, param, max_depth)
    return function.parameters if "$ref" in function.parameters else {"type": "object", **function.parameters}
