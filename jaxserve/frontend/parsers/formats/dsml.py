"""Tool calls of DeepSeek-V3.2 and V4: tags with the mark DSML that say which values are strings."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.tagged import TaggedBody, TypeFlags
from jaxserve.frontend.parsers.tool_format import CallSyntax, ToolFormat

_BODY: Final = TaggedBody(
    name_end='">',
    parameter='<｜DSML｜parameter name="',
    parameter_name_end='"',
    flags=TypeFlags(string=' string="true">', json=' string="false">', unknown=">"),
    parameter_end="</｜DSML｜parameter>",
    has_own_lines=False,
)

DEEPSEEK_V32_TOOLS: Final = ToolFormat(
    name="deepseek_v32",
    sections=(
        Section(
            wrapper="<｜DSML｜function_calls>",
            opener='<｜DSML｜invoke name="',
            body=_BODY,
            closer="</｜DSML｜invoke>",
            wrapper_end="</｜DSML｜function_calls>",
            inner=("｜DSML｜",),
        ),
    ),
    template_signs=("<｜DSML｜function_calls>", "{{ dsml_token }}function_calls"),
    syntaxes=(
        CallSyntax(
            begin="<｜DSML｜function_calls>",
            before='\n<｜DSML｜invoke name="',
            between='">\n',
            arguments=_BODY,
            after="</｜DSML｜invoke>",
            separator="",
            end="\n</｜DSML｜function_calls>",
            is_name_quoted=False,
        ),
    ),
    priority=4,
)
DEEPSEEK_V4_TOOLS: Final = replace(
    DEEPSEEK_V32_TOOLS,
    name="deepseek_v4",
    sections=(
        replace(DEEPSEEK_V32_TOOLS.sections[0], wrapper="<｜DSML｜tool_calls>", wrapper_end="</｜DSML｜tool_calls>"),
    ),
    template_signs=("<｜DSML｜tool_calls>", "{{ dsml_token }}tool_calls"),
    syntaxes=(replace(DEEPSEEK_V32_TOOLS.syntaxes[0], begin="<｜DSML｜tool_calls>", end="\n</｜DSML｜tool_calls>"),),
)
