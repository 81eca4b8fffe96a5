"""The tools of a request, and what it says of their choice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.apis.schema.decode import missing, shorten
from jaxserve.bounds import Bound
from jaxserve.config import LimitsConfig
from jaxserve.errors import InvalidRequestError, invalid, unsupported
from jaxserve.frontend.bounds import check_bound

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class FunctionDefinition(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, kw_only=True):
    type: str
    function: FunctionDefinition | None = None


ToolChoice = str | dict[str, Any]
"""none, auto, required, or the object that names a function."""


def check_tools(tools: Sequence[ToolDefinition] | None, choice: ToolChoice | None, limits: LimitsConfig) -> None:
    """Refuse tools that cannot be called, and choices that nothing here enforces."""
    tools = tools or ()
    names: set[str] = set()
    for i, tool in enumerate(tools):
        _check_tool(f"tools[{i}]", tool, names, limits)
    _check_choice(choice, names)


def offered_tools(tools: Sequence[ToolDefinition] | None, choice: ToolChoice | None) -> list[FunctionDefinition]:
    """The functions that the model hears of."""
    return [] if choice == "none" else [tool.function for tool in tools or () if tool.function is not None]


def named_function(choice: ToolChoice | None) -> str | None:
    """The function that the choice names."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def template_tools(functions: Sequence[FunctionDefinition]) -> list[dict[str, Any]]:
    """The tools as chat templates read them."""
    return [{"type": "function", "function": _template_function(function)} for function in functions]


def parameter_schemas(functions: Sequence[FunctionDefinition]) -> dict[str, dict[str, Any]]:
    """The schema of each function's parameters, by name."""
    return {function.name: function.parameters or {} for function in functions}


def _template_function(function: FunctionDefinition) -> dict[str, Any]:
    """Complete: templates do not ask whether a description or parameters are there."""
    return {
        "name": function.name,
        "description": function.description or "",
        "parameters": function.parameters or {"type": "object", "properties": {}},
    }


def _check_tool(place: str, tool: ToolDefinition, names: set[str], limits: LimitsConfig) -> None:
    """Adds the tool's name to `names`."""
    if tool.type != "function":
        raise unsupported(f"{place}.type", f"must be 'function', got {shorten(tool.type)}")
    function = tool.function
    if function is None:
        raise missing(f"{place}.function")
    if not _NAME.fullmatch(function.name):
        raise invalid(f"{place}.function.name", f"1 to 64 of a-z A-Z 0-9 _ . -, got {shorten(function.name)}")
    if function.name in names:
        raise invalid(f"{place}.function.name", f"{function.name} is defined twice")
    names.add(function.name)
    definition = msgspec.json.encode(function).decode()
    check_bound(Bound("characters", 0, "max_function_chars"), f"{place}.function", definition, limits)


def _check_choice(choice: ToolChoice | None, names: set[str]) -> None:
    if choice is None or choice == "none":
        return
    if not names:
        raise InvalidRequestError("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    if choice == "auto":
        return
    if isinstance(choice, dict):
        if choice.get("type") != "function" or named_function(choice) not in names:
            raise invalid("tool_choice", f"none of the tools is {shorten(choice)}")
    elif choice != "required":
        raise invalid("tool_choice", f"must be none, auto, required or a function, got {shorten(choice)}")
