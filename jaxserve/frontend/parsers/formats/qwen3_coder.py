"""Tool calls of Qwen3-Coder: one tag per parameter."""

from __future__ import annotations

from typing import Final

from jaxserve.frontend.parsers.bodies import TaggedBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.tool_format import ToolFormat

QWEN3_CODER_TOOLS: Final = ToolFormat(
    name="qwen3_coder",
    sections=(
        Section(
            wrapper="<tool_call>",
            opener="<function=",
            body=TaggedBody(
                name_end=">", parameter="<parameter=", parameter_name_end=">", parameter_end="</parameter>"
            ),
            closer="</function>",
            wrapper_end="</tool_call>",
        ),
    ),
    template_signs=("<parameter=",),
)
