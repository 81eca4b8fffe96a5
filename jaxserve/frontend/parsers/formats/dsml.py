"""Tool calls of DeepSeek-V3.2 and V4: tags with the mark DSML that say which values are strings."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.tagged import TaggedBody, TypeFlags
from jaxserve.frontend.parsers.tool_format import ToolFormat, wrapped_syntax

_BODY: Final = TaggedBody(
    name_end='">',
    parameter='<｜DSML｜parameter name="',
    parameter_name_end='"',
    flags=TypeFlags(string=' string="true">', json=' string="false">', unknown=">"),
    parameter_end="</｜DSML｜parameter>",
    has_own_lines=False,
)

_SECTION: Final = Section(
    wrapper="<｜DSML｜function_calls>",
    opener='<｜DSML｜invoke name="',
    body=_BODY,
    closer="</｜DSML｜invoke>",
    wrapper_end="</｜DSML｜function_calls>",
    inner=("｜DSML｜",),
)
_SECTION4: Final = replace(_SECTION, wrapper="<｜DSML｜tool_calls>", wrapper_end="</｜DSML｜tool_calls>")

DEEPSEEK_V32_TOOLS: Final = ToolFormat(
    name="deepseek_v32",
    sections=(_SECTION,),
    template_signs=("<｜DSML｜function_calls>", "{{ dsml_token }}function_calls"),
    syntaxes=(wrapped_syntax(_SECTION, '">\n', _BODY, line="\n"),),
    priority=4,
)
DEEPSEEK_V4_TOOLS: Final = replace(
    DEEPSEEK_V32_TOOLS,
    name="deepseek_v4",
    sections=(_SECTION4,),
    template_signs=("<｜DSML｜tool_calls>", "{{ dsml_token }}tool_calls"),
    syntaxes=(wrapped_syntax(_SECTION4, '">\n', _BODY, line="\n"),),
)
