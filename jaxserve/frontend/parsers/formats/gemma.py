"""Tool calls and reasoning of Gemma: `call:f{...}` with strings between markers."""

from __future__ import annotations

from typing import Final

from jaxserve.frontend.parsers.bodies import GemmaBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.reasoning import ReasoningFormat
from jaxserve.frontend.parsers.tool_format import ToolFormat

GEMMA_TOOLS: Final = ToolFormat(
    name="gemma",
    sections=(
        Section(
            opener="<start_function_call>",
            body=GemmaBody(),
            closer="<end_function_call>",
            inner=("<escape>",),
        ),
        Section(opener="<|tool_call>", body=GemmaBody(), closer="<tool_call|>", inner=('<|"|>',)),
    ),
    template_signs=("<start_function_call>", "<|tool_call>"),
)

GEMMA4_REASONING: Final = ReasoningFormat(
    name="gemma4", opener="<|channel>thought", closer="<channel|>", template_signs=("<|channel>thought",)
)
