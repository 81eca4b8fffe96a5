"""Tool calls of MiniMax-M2 and dots: invocations whose parameters are tags with a name."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.tagged import TaggedBody
from jaxserve.frontend.parsers.tool_format import ToolFormat, wrapped_syntax

_BODY: Final = TaggedBody(
    name_end='">',
    parameter='<parameter name="',
    parameter_name_end='">',
    parameter_end="</parameter>",
    has_own_lines=False,
)

_SECTION: Final = Section(
    wrapper="<minimax:tool_call>",
    opener='<invoke name="',
    body=_BODY,
    closer="</invoke>",
    wrapper_end="</minimax:tool_call>",
)

MINIMAX_M2_TOOLS: Final = ToolFormat(
    name="minimax_m2",
    sections=(_SECTION,),
    template_signs=("<minimax:tool_call>",),
    syntaxes=(wrapped_syntax(_SECTION, '">\n', _BODY, line="\n"),),
)
_DOTS_SECTION: Final = replace(_SECTION, wrapper="<dots_function_call>", wrapper_end="</dots_function_call>")
DOTS_TOOLS: Final = ToolFormat(
    name="dots",
    sections=(_DOTS_SECTION,),
    template_signs=("<dots_function_call>",),
    syntaxes=(wrapped_syntax(_DOTS_SECTION, '">\n', _BODY, line="\n"),),
)
