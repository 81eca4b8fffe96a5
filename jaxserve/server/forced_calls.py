"""A grammar for replies that must be tool calls: the model's own spelling around arguments held to their schemas."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.errors import UnsupportedParameterError
from jaxserve.ipc.messages import ForcedCall, ForcedCalls, Grammar
from jaxserve.server.schema.structured import NamedGrammar, schema_grammar
from jaxserve.server.schema.tools import FunctionDefinition, ToolChoice, ToolDefinition, named_function, offered_tools
from jaxserve.server.tokenization import Tokenization

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def forced_calls(
    tokens: Tokenization,
    tools: list[ToolDefinition] | None,
    choice: ToolChoice | None,
    *,
    is_parallel: bool,
    max_depth: int,
) -> NamedGrammar | None:
    """What `tool_choice` asks for; None when it leaves the choice to the model.

    Raises UnsupportedParameterError when nothing of text can force this model to call.
    """
    named = named_function(choice)
    if choice != "required" and named is None:
        return None
    spelling = tokens.dialect.tools.forced if tokens.dialect.tools is not None else None
    if spelling is None or tokens.tokenizer.special_tokens_in([spelling.before, spelling.behind]):
        raise UnsupportedParameterError(
            "Unsupported parameter: 'tool_choice' may only be none or auto: no call can be forced in the format in "
            "which this model writes them (--tool-call-parser).",
            param="tool_choice",
        )
    ways = []
    for i, function in enumerate(offered_tools(tools, choice)):
        if named in (None, function.name):
            schema = _arguments(function, f"tools[{i}].function.parameters", max_depth)
            before = spelling.before + msgspec.json.encode(function.name).decode() + spelling.between
            ways.append(ForcedCall(before, schema, spelling.behind))
    calls = ForcedCalls(ways, spelling.separator if is_parallel and named is None else None)
    return NamedGrammar(Grammar("calls", msgspec.json.encode(calls).decode()), "tools")


def _arguments(function: FunctionDefinition, param: str, max_depth: int) -> dict[str, Any]:
    """The schema, of an object in any case."""
    if function.parameters is None:
        return _NO_PARAMETERS
    schema_grammar(function.parameters, param, max_depth)
    return function.parameters if "$ref" in function.parameters else {"type": "object", **function.parameters}
