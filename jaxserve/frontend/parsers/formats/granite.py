"""Tool calls of Granite 3 and Phi-4-mini: a JSON list after `<|tool_call|>`."""

from __future__ import annotations

from typing import Final

from jaxserve.frontend.parsers.bodies import JsonBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.reasoning import ReasoningFormat
from jaxserve.frontend.parsers.tool_format import CallSyntax, ToolFormat

GRANITE_TOOLS: Final = ToolFormat(
    name="granite",
    sections=(Section(opener="<|tool_call|>", body=JsonBody(), closer="<|/tool_call|>"),),
    template_signs=("<|tool_call|>",),
    syntaxes=(CallSyntax(begin="<|tool_call|>[", separator=", ", end="]"),),
)
PHI4_MINI_TOOLS: Final = ToolFormat(
    name="phi4_mini_json",
    sections=(*GRANITE_TOOLS.sections, Section(opener="functools", body=JsonBody())),
    template_signs=("<|/tool|>",),
    syntaxes=GRANITE_TOOLS.syntaxes,
    priority=4,
)
GRANITE_REASONING: Final = ReasoningFormat(
    name="granite",
    opener="Here is my thought process:",
    closer="Here is my response:",
    other_openers=("Here's my thought process:",),
    other_closers=("Here's my response:",),
    template_signs=("Here is my thought process:",),
    priority=1,
)
"""Granite 3.2."""
