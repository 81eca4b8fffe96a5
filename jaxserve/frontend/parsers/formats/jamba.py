"""Tool calls of Jamba 1.5 to 1.7: a JSON list between `<tool_calls>` tags."""

from __future__ import annotations

from typing import Final

from jaxserve.frontend.parsers.bodies import JsonBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.tool_format import CallSyntax, ToolFormat

JAMBA_TOOLS: Final = ToolFormat(
    name="jamba",
    sections=(Section(opener="<tool_calls>", body=JsonBody(), closer="</tool_calls>"),),
    template_signs=("<tool_calls>",),
    foreign_signs=("<tool_call>", "<tool_sep>", "<invoke"),
    syntaxes=(
        CallSyntax(
            begin="<tool_calls>[\n",
            before='{"name": ',
            between=', "arguments": ',
            after="}",
            separator=",\n",
            end="\n]</tool_calls>",
        ),
    ),
    priority=0,
)
