"""Tool calls of Llama 3.1 to 3.3: a bare JSON object."""

from __future__ import annotations

from typing import Final

from jaxserve.frontend.parsers.bodies import JsonBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.tool_format import CallSyntax, ToolFormat

LLAMA3_JSON_TOOLS: Final = ToolFormat(
    name="llama3_json",
    aliases=("llama4_json",),
    sections=(Section(body=JsonBody()), Section(opener="<|python_tag|>", body=JsonBody())),
    template_signs=("<|python_tag|>", '"parameters": dictionary'),
    foreign_signs=("<function=",),
    syntaxes=(CallSyntax(is_bare=True, between=', "parameters": '),),
    priority=0,
)
