"""Tool calls of models whose chat template has no place for tools: the system message explains this format to them.

The reply may be a bare JSON object as well, since weak models leave out the tags.
"""

from __future__ import annotations

from typing import Final

from jaxserve.frontend.parsers.bodies import JsonBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.tool_format import CallSyntax, ToolFormat

GENERIC_TOOLS: Final = ToolFormat(
    name="generic",
    sections=(Section(body=JsonBody()), Section(opener="<tool_call>", body=JsonBody(), closer="</tool_call>")),
    template_signs=(),
    syntaxes=(
        CallSyntax(
            begin="<tool_call>",
            before='\n{"name": ',
            between=', "arguments": ',
            after="}\n</tool_call>",
            separator="\n<tool_call>",
        ),
    ),
    is_explained=True,
)
