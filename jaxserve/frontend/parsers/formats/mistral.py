"""Tool calls and reasoning of Mistral: `[TOOL_CALLS]` and a name, or a list of JSON objects."""

from __future__ import annotations

import re
from typing import Final

from jaxserve.frontend.parsers.bodies import HeaderBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.reasoning import ReasoningFormat
from jaxserve.frontend.parsers.tool_format import CallSyntax, ToolFormat

_HEADER = re.compile(r"\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?\s*")

MISTRAL_TOOLS: Final = ToolFormat(
    name="mistral",
    sections=(Section(opener="[TOOL_CALLS]", body=HeaderBody(_HEADER), inner=("[ARGS]", "[CALL_ID]")),),
    template_signs=("[TOOL_CALLS]",),
    num_id_characters=9,
    syntaxes=(
        CallSyntax(
            begin="[TOOL_CALLS]",
            before="",
            between="[ARGS]",
            after="",
            separator="[TOOL_CALLS]",
            is_name_quoted=False,
            control_tokens=("[TOOL_CALLS]", "[ARGS]"),
        ),
        CallSyntax(begin="[TOOL_CALLS] [", separator=", ", end="]"),
    ),
)

MISTRAL_REASONING: Final = ReasoningFormat(
    name="mistral", opener="[THINK]", closer="[/THINK]", template_signs=("[THINK]",)
)
