"""Tool calls and reasoning of Command A and Command R7B: a JSON list after `<|START_ACTION|>`."""

from __future__ import annotations

from typing import Final

from jaxserve.frontend.parsers.bodies import JsonBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.reasoning import ReasoningFormat
from jaxserve.frontend.parsers.tool_format import CallSyntax, ToolFormat

COHERE_TOOLS: Final = ToolFormat(
    name="cohere",
    aliases=("cohere_command3", "cohere_command4"),
    sections=(Section(opener="<|START_ACTION|>", body=JsonBody(), closer="<|END_ACTION|>"),),
    template_signs=("<|START_ACTION|>",),
    syntaxes=(
        CallSyntax(
            begin="<|START_ACTION|>[\n    ",
            before='{"tool_call_id": "{index}", "tool_name": ',
            between=', "parameters": ',
            separator=",\n    ",
            end="\n]<|END_ACTION|>",
        ),
    ),
)
COHERE_REASONING: Final = ReasoningFormat(
    name="cohere",
    aliases=("cohere_command3", "cohere_command4"),
    opener="<|START_THINKING|>",
    closer="<|END_THINKING|>",
    template_signs=("<|START_THINKING|>",),
    priority=1,
)
