"""Tool calls of GLM-4.5 to GLM-5, Ling 3.0, Laguna and HyperCLOVA X SEED Think: a name, then keys and values between tags."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.tagged import TaggedBody
from jaxserve.frontend.parsers.tool_format import CallSyntax, ToolFormat

_BODY: Final = TaggedBody(
    parameter="<arg_key>",
    parameter_name_end="</arg_key>",
    value_start="<arg_value>",
    parameter_end="</arg_value>",
    has_own_lines=False,
)

GLM45_TOOLS: Final = ToolFormat(
    name="glm45",
    aliases=("poolside_v1", "ling3"),
    sections=(Section(opener="<tool_call>", body=_BODY, closer="</tool_call>"),),
    template_signs=("<arg_key>",),
    syntaxes=(
        CallSyntax(
            begin="<tool_call>",
            before="",
            between="\n",
            arguments=_BODY,
            after="</tool_call>",
            separator="\n<tool_call>",
            is_name_quoted=False,
        ),
    ),
)
GLM47_TOOLS: Final = replace(
    GLM45_TOOLS,
    name="glm47",
    aliases=(),
    template_signs=("</arg_key><arg_value>",),
    syntaxes=(replace(GLM45_TOOLS.syntaxes[0], between="", arguments=replace(_BODY, gap=""), separator="<tool_call>"),),
    priority=4,
)
"""GLM-4.7 and later: nothing between the tags."""
