"""Tool calls of Nemotron Nano 2 and Llama-Nemotron: a JSON list between `<TOOLCALL>` tags."""

from __future__ import annotations

from typing import Final

from jaxserve.frontend.parsers.bodies import JsonBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.tool_format import CallSyntax, ToolFormat

NEMOTRON_JSON_TOOLS: Final = ToolFormat(
    name="nemotron_json",
    sections=(Section(opener="<TOOLCALL>", body=JsonBody(), closer="</TOOLCALL>"),),
    template_signs=("<TOOLCALL>",),
    syntaxes=(
        CallSyntax(
            begin="<TOOLCALL>[",
            before='{"name": ',
            between=', "arguments": ',
            after="}",
            separator=", ",
            end="]</TOOLCALL>",
        ),
    ),
)
