"""Tool calls of Hermes, Qwen2.5, Qwen3 and SmolLM3: JSON objects between `<tool_call>` tags."""

from __future__ import annotations

from typing import Final

from jaxserve.frontend.parsers.bodies import JsonBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.tool_format import CallSyntax, ToolFormat

HERMES_TOOLS: Final = ToolFormat(
    name="hermes",
    aliases=("ernie45", "exaone4", "granite4"),
    sections=(Section(opener="<tool_call>", body=JsonBody(), closer="</tool_call>"),),
    template_signs=("<tool_call>",),
    foreign_signs=("<tool_calls>", "<invoke"),
    syntaxes=(
        CallSyntax(
            begin="<tool_call>",
            before='\n{"name": ',
            after="}\n</tool_call>",
            separator="\n<tool_call>",
        ),
    ),
    priority=1,
)
